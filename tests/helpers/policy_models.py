"""The policies in plain Python, whose floats are exact where these are used.

The headroom rule is not written out again: its model is the policy itself, run
step by step outside of all transformations, so that a program shows what they
and the optimizer tell it.
"""

import dataclasses
import functools

import jax
import numpy as np

import optax_lossscale as ols


@functools.partial(jax.jit, static_argnums=0)
def _scan(make_policy, numbers, finites, state):
  policy = make_policy(**numbers)

  def step(state, finite):
    state = policy.adjust(state, finite)
    return state, state

  return jax.lax.scan(step, state, finites)[1]


def run_policy(policy, finites, state=None):
  """The states after each step, in NumPy.

  Runs are padded, and the numbers of a DynamicLossScale are arguments of the
  compiled scan, so that its policies share a program.
  """
  make_policy, numbers = _split(policy)
  padded = np.zeros(max(32, 1 << (len(finites) - 1).bit_length()), bool)
  padded[: len(finites)] = finites
  state = jax.tree.map(np.asarray, policy.init() if state is None else state)
  states = _scan(make_policy, numbers, padded, state)
  return jax.tree.map(lambda x: np.asarray(x)[: len(finites)], states)


def _split(policy):
  if not isinstance(policy, ols.DynamicLossScale):
    return _Constant(policy), {}
  numbers = dataclasses.asdict(policy)
  # The structure of the state, or a branch in Python, depends on these.
  words = numbers.pop("hysteresis"), numbers.pop("hysteresis_refill")
  return _make_dynamic(*words), numbers


@functools.cache
def _make_dynamic(hysteresis, refill):
  return functools.partial(
    ols.DynamicLossScale, hysteresis=hysteresis, hysteresis_refill=refill
  )


@dataclasses.dataclass(frozen=True)
class _Constant:
  policy: object

  def __call__(self):
    return self.policy


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
    if new_policy_state is not None and type(new_policy_state) is not type(
      self.policy_state
    ):
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
