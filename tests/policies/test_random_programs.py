"""Random programs against a plain Python model, every invariant at each step.

100 programs here, 300 in CI, on each number of devices; `make nightly` runs
10,000.
"""

import functools
import pickle

from helpers import sharding
from helpers.bits import has_same_bits
from helpers.policy_models import make_policy, Model, split_policy
from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols

BAD = [None, np.nan, np.inf, -np.inf]
SIZE = 8  # parameters, spread over one, two or eight devices
INNER = optax.sgd(0.5, momentum=0.5)
REFILLS = ["growth", "finite", "backoff"]


class Run(Model):
  """A model of the effect of steps on state, parameters and optimizer."""

  def __init__(self, policy):
    super().__init__(policy)
    self.w = np.arange(SIZE, dtype=np.float32)
    self.momentum = np.zeros(SIZE, np.float32)

  def apply(self, grads):
    self.momentum = grads + np.float32(0.5) * self.momentum
    self.w = self.w - np.float32(0.5) * self.momentum


@functools.cache
def compile_step(kind, devices, grads_are_scaled):
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
  states = ols.WithLossScalingState(P(), P("d"))
  return jax.jit(
    jax.shard_map(
      step,
      mesh=sharding.make_mesh((devices,), ("d",)),
      in_specs=(P(), states, P("d"), P("d")),
      out_specs=(states, P("d")),
    )
  )


SCALES = st.integers(-60, 60).map(lambda k: 2.0**k)


@st.composite
def policies(draw):
  kind = draw(st.sampled_from(["fixed", "dynamic", "headroom"]))
  if kind == "fixed":
    return ols.FixedLossScale(draw(SCALES))
  low, init, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
  scales = {"init_scale": init, "min_scale": low, "max_scale": high}
  if kind == "headroom":
    margin = draw(st.integers(-2, 6))
    return ols.HeadroomLossScale(**scales, margin=margin, amax_history_len=2)
  hysteresis = draw(st.integers(1, 3))
  refill = draw(st.sampled_from(REFILLS)) if hysteresis > 1 else "growth"
  return ols.DynamicLossScale(
    **scales,
    # Powers of two, which round no gradient: the params are compared by bits.
    growth_factor=draw(st.sampled_from([2.0, 4.0, 2.0**20])),
    backoff_factor=draw(st.sampled_from([0.5, 0.25, 2.0**-20])),
    growth_interval=draw(st.integers(1, 4)),
    hysteresis=hysteresis,
    hysteresis_refill=refill,
  )


STEP = st.tuples(
  st.just("step"),
  st.sampled_from([None, None, *BAD]),
  st.integers(0, SIZE - 1),
  st.sampled_from([0.0, 0.25, 1.0, 1.0]),
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


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
@given(policies(), st.lists(OPERATION, min_size=1, max_size=14))
def test_any_program_behaves_like_the_model(devices, policy, program):
  model = Run(policy)
  tx = ols.with_loss_scaling(INNER, policy)
  w = jnp.asarray(model.w)
  state = tx.init(w)
  for number, (name, *args) in enumerate(program):
    if name == "step":
      bad, where, size, grads_are_scaled = args
      grads = (np.arange(SIZE, dtype=np.float32) - number) * np.float32(size)
      amax = float(abs(grads).max())
      if bad is None:
        model.apply(grads)
      else:
        grads[where] = bad
      kind, numbers = split_policy(model.policy)
      step = compile_step(kind, devices, grads_are_scaled)
      state, w = step(numbers, state, w, grads)
      got = state.loss_scale_state
      assert got.last_finite == (bad is None)
      model.step(bad is None, amax)
    elif name == "checkpoint":
      on_host = jax.tree.map(np.asarray, (state, w))
      state, w = pickle.loads(pickle.dumps(on_host))
    elif name == "set":
      model.set_scale(args[0])
      state = ols.set_loss_scale(state, args[0])
    else:
      model.switch(args[0])
      state = switch_policy(state, args[0])
    check(state, w, model)


def switch_policy(state, policy):
  """The state as another policy takes it over."""
  fresh = policy.init().policy_state
  scale_state = state.loss_scale_state
  structures = map(jax.tree.structure, (fresh, scale_state.policy_state))
  if len(set(structures)) == 2:
    scale_state = scale_state._replace(policy_state=fresh)
  return state._replace(loss_scale_state=scale_state)


def check(state, w, model):
  got = state.loss_scale_state
  assert got.loss_scale == model.scale
  assert 2.0**-126 <= got.loss_scale <= 2.0**126
  assert got.finite_count == model.count
  assert got.notfinite_count == model.in_a_row
  assert got.total_notfinite == model.total
  check_policy_state(got.policy_state, model.policy_state)
  dtypes = [str(x.dtype) for x in got[:5]]
  assert dtypes == ["float32", "int32", "int32", "bool", "int32"]
  assert all(x.shape == () for x in got[:5])
  assert np.asarray(w).tobytes() == model.w.tobytes()
  trace = np.asarray(state.inner_state[0].trace)
  assert trace.tobytes() == model.momentum.tobytes()
  for leaf in jax.tree.leaves(got):
    if isinstance(leaf, jax.Array):  # and not restored from a checkpoint
      shards = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
      assert len(shards) == 1


def check_policy_state(got, want):
  if isinstance(want, ols.HeadroomPolicyState):
    assert has_same_bits(tuple(got), tuple(want))
  else:
    assert got == (() if want is None else (want,))
