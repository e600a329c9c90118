"""The policies in plain Python, and what runs and records them.

Python's floats are exact where the models are used.

The headroom rule is not written out again: its model is the policy itself, run
step by step outside of all transformations, so that a program shows what they
and the optimizer tell it.
"""

import dataclasses
import functools

import jax
import numpy as np

import optax_lossscale as ols

# The structure of a state, or a branch in Python, depends on these.
STATIC = {"hysteresis_refill", "dtype", "amax_history_len"}


def split_policy(policy):
  """Return what is compiled in of a policy, and the numbers that are not."""
  fields = dataclasses.asdict(policy)
  static = STATIC & set(fields)
  if fields.get("hysteresis") == 1:  # as opposed to one that may be any
    static.add("hysteresis")
  words = tuple((name, fields.pop(name)) for name in sorted(static))
  return (type(policy), words), fields


def make_policy(kind, numbers):
  """Return the policy that was split; its numbers may be traced."""
  cls, words = kind
  return cls(**numbers, **dict(words))


@functools.partial(jax.jit, static_argnums=0)
def _scan(kind, numbers, finites, amaxes, state):
  policy = make_policy(kind, numbers) if numbers else kind

  def step(state, inputs):
    finite, amax = inputs
    state = policy.adjust(state, finite, grads_amax=amax)
    return state, state

  return jax.lax.scan(step, state, (finites, amaxes))[1]


def run_policy(policy, finites, state=None, amaxes=0.0, **traced):
  """The states after each step, in NumPy.

  Runs are padded, and the numbers of the policies of the package are arguments
  of the compiled scan, so that its policies share a program. `traced` replaces
  some of them after the policy has checked its own.
  """
  steps = len(finites)
  length = max(512, 1 << (steps - 1).bit_length())
  padded_finites = np.zeros(length, bool)
  padded_amaxes = np.zeros(length, np.float32)
  padded_finites[:steps], padded_amaxes[:steps] = finites, amaxes
  is_public = type(policy).__module__ == ols.__name__
  kind, numbers = split_policy(policy) if is_public else (policy, {})
  state = jax.tree.map(np.asarray, policy.init() if state is None else state)
  states = _scan(kind, numbers | traced, padded_finites, padded_amaxes, state)
  return jax.tree.map(lambda x: np.asarray(x)[:steps], states)


class AmaxRecorder:
  """A policy that remembers the largest gradient that it received."""

  def init(self):
    state = ols.FixedLossScale(1.0).init()
    return state._replace(policy_state=np.float32(0))

  def adjust(self, state, grads_finite, *, grads_amax=None):
    state = ols.FixedLossScale(1.0).adjust(state, grads_finite)
    return state._replace(policy_state=grads_amax)


class Model:
  """The counts and the scale of a state, and what the policy remembers."""

  def __init__(self, policy):
    self.policy, self.policy_state = policy, make_initial_policy_state(policy)
    self.scale = float(policy.init().loss_scale)
    self.count = self.in_a_row = self.total = 0

  def step(self, finite, amax=0.0):
    """Moves on by a step."""
    old_in_a_row = self.in_a_row
    self.count = self.count + 1 if finite else 0
    self.in_a_row = 0 if finite else old_in_a_row + 1
    self.total += not finite
    if isinstance(self.policy, ols.FixedLossScale):
      return
    if isinstance(self.policy, ols.DynamicLossScale):
      new_scale, self.policy_state, restarts = adjust_dynamic(
        self.policy, self.scale, self.policy_state, self.count, finite
      )
    else:
      new_scale, self.policy_state = adjust_headroom(
        self.policy, self.scale, self.policy_state, old_in_a_row, finite, amax
      )
      restarts = new_scale != self.scale
    self.scale = new_scale
    self.count = 0 if restarts else self.count

  def switch(self, policy):
    """Goes on by another policy, and with its policy state if that fits."""
    new_policy_state = make_initial_policy_state(policy)
    if type(new_policy_state) is not type(self.policy_state):
      self.policy_state = new_policy_state
    self.policy = policy

  def set_scale(self, value):
    self.scale, self.count = value, 0


def make_initial_policy_state(policy):
  """Return the policy state before the first step."""
  if isinstance(policy, ols.HeadroomLossScale):
    return policy.init().policy_state
  if isinstance(policy, ols.DynamicLossScale) and policy.hysteresis > 1:
    return policy.hysteresis
  return None


def adjust_dynamic(policy, scale, remaining, count, finite):
  """The scale, the hysteresis left, and whether DynamicLossScale grows.

  The count is that of the finite steps in a row, with this one.
  """
  p, factor = policy, 1.0
  grows = finite and count >= p.growth_interval
  policy_state, remaining = (
    remaining,
    min(remaining, p.hysteresis) if p.hysteresis > 1 else 1,
  )
  if finite:
    if grows:
      factor = p.growth_factor
    if grows or p.hysteresis_refill != "growth":
      remaining = p.hysteresis
  else:
    remaining = max(remaining - 1, 0)
    if remaining == 0:
      factor = p.backoff_factor
      if p.hysteresis_refill == "backoff":
        remaining = p.hysteresis
  with np.errstate(over="ignore", under="ignore"):
    scale = np.float32(scale) * np.float32(factor)
  scale = np.clip(scale, np.float32(p.min_scale), np.float32(p.max_scale))
  # Without hysteresis, what another policy remembers stays for it.
  return float(scale), remaining if p.hysteresis > 1 else policy_state, grows


def adjust_headroom(policy, scale, policy_state, in_a_row, finite, amax):
  """HeadroomLossScale; in_a_row is the overflows in a row before this step.

  Returns the scale, and what is remembered.
  """
  state = ols.set_loss_scale(policy.init(), scale)
  state = state._replace(
    policy_state=policy_state,
    notfinite_count=np.int32(in_a_row),
    last_finite=not in_a_row,
  )
  new_state = policy.adjust(state, finite, grads_amax=np.float32(amax))
  return float(new_state.loss_scale), new_state.policy_state
