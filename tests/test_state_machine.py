"""Random programs against a plain Python model, every invariant at each step.

500 programs here; `make nightly` runs 10,000.
"""

import dataclasses
import functools
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import optax_lossscale as ols

BAD = [None, np.nan, np.inf, -np.inf]
SIZE = 8  # parameters, spread over one or eight devices
INNER = optax.sgd(0.5, momentum=0.5)
REFILLS = ["growth", "finite", "backoff"]


class Model:
  """What a step does, in Python and numpy's float32."""

  def __init__(self, policy):
    self.policy = policy
    self.scale = np.float32(policy.init().loss_scale)
    self.count = self.in_a_row = self.total = 0
    self.left = None  # the memory: the hysteresis left, if it is kept
    self.switch(policy)
    self.w = np.arange(SIZE, dtype=np.float32)
    self.momentum = np.zeros(SIZE, np.float32)

  def step(self, grads, finite):
    if finite:
      self.momentum = grads + np.float32(0.5) * self.momentum
      self.w = self.w - np.float32(0.5) * self.momentum
      self.count, self.in_a_row = self.count + 1, 0
    else:
      self.count, self.in_a_row = 0, self.in_a_row + 1
      self.total += 1
    if isinstance(self.policy, ols.DynamicLossScale):
      self._adjust(finite)

  def _adjust(self, finite):
    p = self.policy
    left = 1 if self.left is None else min(self.left, p.hysteresis)
    factor = 1.0
    if finite:
      if p.hysteresis_refill != "growth":
        left = p.hysteresis
      if self.count >= p.growth_interval:
        self.count, left, factor = 0, p.hysteresis, p.growth_factor
    else:
      left = max(left - 1, 0)
      if left == 0:
        factor = p.backoff_factor
        if p.hysteresis_refill == "backoff":
          left = p.hysteresis
    if self.left is not None:
      self.left = left
    with np.errstate(over="ignore", under="ignore"):
      scale = self.scale * np.float32(factor)
    self.scale = np.clip(
      scale, np.float32(p.min_scale), np.float32(p.max_scale)
    )

  def switch(self, policy):
    self.policy = policy
    if self.left is None and getattr(policy, "hysteresis", 1) > 1:
      self.left = policy.hysteresis

  def set_scale(self, value):
    self.scale, self.count = np.float32(value), 0


@functools.cache
def compiled_step(kind, devices, grads_are_scaled):
  """A jitted step for all hyperparameters of a kind of policy."""

  def step(numbers, state, w, grads):
    policy = make_policy(kind, numbers)
    tx = ols.with_loss_scaling(
      INNER,
      policy,
      axis_name="d" if devices > 1 else None,
      grads_are_scaled=grads_are_scaled,
    )
    if grads_are_scaled:
      grads = ols.scale_loss(grads, state)
    updates, state = tx.update(grads, state, w)
    return state, optax.apply_updates(w, updates)

  if devices == 1:
    return jax.jit(step)
  states = ols.LossScalingState(P(), P("d"))
  return jax.jit(
    jax.shard_map(
      step,
      mesh=jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,)),
      in_specs=(P(), states, P("d"), P("d")),
      out_specs=(states, P("d")),
    )
  )


def split_policy(policy):
  """A policy as what is compiled in, and the numbers that are not."""
  fields = dataclasses.asdict(policy)
  kind = type(policy), fields.pop("hysteresis_refill", None)
  return kind, {k: jnp.asarray(v) for k, v in fields.items()}


def make_policy(kind, numbers):
  cls, refill = kind
  words = {} if refill is None else {"hysteresis_refill": refill}
  return cls(**numbers, **words)


SCALES = st.integers(-60, 60).map(lambda k: 2.0**k)


@st.composite
def policies(draw):
  if draw(st.integers(0, 3)) == 0:
    return ols.FixedLossScale(draw(SCALES))
  low, init, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
  return ols.DynamicLossScale(
    init_scale=init,
    # Powers of two, which round no gradient: the params are compared by bits.
    growth_factor=draw(st.sampled_from([2.0, 4.0, 2.0**20])),
    backoff_factor=draw(st.sampled_from([0.5, 0.25, 2.0**-20])),
    growth_interval=draw(st.integers(1, 4)),
    min_scale=low,
    max_scale=high,
    hysteresis=draw(st.integers(1, 3)),
    hysteresis_refill=draw(st.sampled_from(REFILLS)),
  )


STEP = st.tuples(
  st.just("step"),
  st.sampled_from([None, None, *BAD]),
  st.integers(0, SIZE - 1),
  st.booleans(),
)
OPERATION = st.one_of(
  STEP,
  STEP,
  STEP,
  st.tuples(st.just("checkpoint")),
  st.tuples(st.just("set"), SCALES),
  st.tuples(st.just("switch"), policies()),
)


@settings(max_examples=max(500, settings.default.max_examples))
@given(
  policies(),
  st.sampled_from([1, 8]),
  st.lists(OPERATION, min_size=1, max_size=14),
)
def test_any_program_does_what_the_model_does(policy, devices, program):
  model = Model(policy)
  tx = ols.with_loss_scaling(INNER, policy)
  w = jnp.asarray(model.w)
  state = tx.init(w)
  for number, (name, *args) in enumerate(program):
    if name == "step":
      bad, where, grads_are_scaled = args
      grads = np.arange(SIZE, dtype=np.float32) - number
      model.step(grads, bad is None)
      if bad is not None:
        grads[where] = bad
      kind, numbers = split_policy(model.policy)
      step = compiled_step(kind, devices, grads_are_scaled)
      state, w = step(numbers, state, w, grads)
      assert state.loss_scale_state.last_finite == (bad is None)
    elif name == "checkpoint":
      state, w = pickle.loads(
        pickle.dumps(jax.tree.map(np.asarray, (state, w)))
      )
    elif name == "set":
      model.set_scale(args[0])
      state = ols.set_loss_scale(state, args[0])
    else:
      model.switch(args[0])
      state = switched(state, args[0])
    check(state, w, model)


def switched(state, policy):
  """The state as another policy takes it over."""
  fresh = policy.init().memory
  scale_state = state.loss_scale_state
  if jax.tree.leaves(fresh) and not jax.tree.leaves(scale_state.memory):
    scale_state = scale_state._replace(memory=fresh)
  return state._replace(loss_scale_state=scale_state)


def check(state, w, model):
  got = state.loss_scale_state
  assert got.loss_scale == model.scale
  assert 2.0**-126 <= got.loss_scale <= 2.0**126
  assert got.finite_count == model.count
  assert got.notfinite_count == model.in_a_row
  assert got.total_notfinite == model.total
  assert got.memory == (() if model.left is None else model.left)
  assert [x.dtype for x in got[:5]] == [
    "float32",
    "int32",
    "int32",
    "bool",
    "int32",
  ]
  assert all(x.shape == () for x in got[:5])
  for got_array, want in [
    (w, model.w),
    (state.inner_state[0].trace, model.momentum),
  ]:
    assert np.asarray(got_array).tobytes() == want.tobytes()
  for leaf in jax.tree.leaves(got):
    if isinstance(leaf, jax.Array):  # and not restored from a checkpoint
      shards = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
      assert len(shards) == 1
