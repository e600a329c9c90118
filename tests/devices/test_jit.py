"""Sharded jit without axis names, in which devices exchange only a flag.

test_shard_map.py compares whole runs with those of one device.
"""

import functools

from helpers import exact_model, mark_slow_params, parametrize_slow, sharding
from helpers.bits import assert_same_bits
from helpers.sharded_runs import JIT_LAYOUTS, ShardedRun
import jax
from jax.sharding import AxisType
import numpy as np
import pytest

import optax_lossscale as ols

AXIS_TYPES = mark_slow_params(
  [AxisType.Explicit], [AxisType.Auto, AxisType.Explicit]
)


SKIPS = [
  ("2x4", True),
  ("2x4", False),
  *((x, True) for x in list(JIT_LAYOUTS)[:3]),
]


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@parametrize_slow("case", SKIPS[:1], SKIPS, ids=str)
def test_an_overflow_in_one_shard_of_one_param_skips_the_step_everywhere(
  case, axis_type
):
  layout, jitted = case
  run = ShardedRun(layout, axis_type)
  batch, overflow = make_two_batches()
  step = jax.jit(run.step) if jitted else run.step
  with jax.set_mesh(run.mesh):
    start = run.start()
    applied = step(*start, run.put(batch))
    skipped = step(*applied, run.put(overflow))
  sharding.assert_replicas_equal((applied, skipped))
  # Sharded as it was, on both kinds of step.
  sharding.assert_shardings_equal(applied, start)
  sharding.assert_shardings_equal(skipped, start)
  assert_same_bits(skipped[0], applied[0])
  assert_same_bits(skipped[1].inner_state, applied[1].inner_state)
  assert np.any(applied[0]["table"] != start[0]["table"])
  state = ols.get_loss_scale_state(skipped)
  assert (state.loss_scale, state.last_finite) == (2.0**9, False)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_init_under_jit_gives_each_leaf_the_requested_sharding(axis_type):
  run = ShardedRun("2x4", axis_type)
  with jax.set_mesh(run.mesh):
    _, opt_state = run.start()
  shardings = jax.tree.map(lambda x: x.sharding, opt_state)
  assert shardings == run.state_shardings
  momentum = opt_state.inner_state[0].trace
  assert momentum["table"].addressable_shards[0].data.shape == (4, 2)
  for leaf in jax.tree.leaves(opt_state.loss_scale_state):
    assert leaf.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_many_sharded_steps_compile_once_and_do_not_use_the_host(axis_type):
  run = ShardedRun("2x4", axis_type)
  two = make_two_batches()
  traces = []

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(*args):
    traces.append(1)
    return run.step(*args)

  with jax.set_mesh(run.mesh):
    batches = [run.put(batch) for batch in two]
    carry = run.start()
    with jax.transfer_guard("disallow"):
      for batch in batches * 2:
        carry = step(*carry, batch)
  assert len(traces) == step._cache_size() == 1
  assert ols.get_loss_scale_state(carry).total_notfinite == 2


def make_two_batches():
  """A finite one, and one that overflows in one entry of the table."""
  batches, _ = exact_model.make_batches(2, overflows=0)
  batches["table"][1, 3, 5, 6] = exact_model.OVERFLOWING
  return [{name: x[i] for name, x in batches.items()} for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_a_step_compiles_for_a_state_that_only_eval_shape_has_seen(axis_type):
  """Shapes from eval_shape, shardings derived from those of the params."""
  run = ShardedRun("2x4", axis_type)
  describe = lambda x, sharding: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding
  )
  with jax.set_mesh(run.mesh):
    params = jax.tree.map(describe, exact_model.init_params(), run.shardings)
    opt_state = jax.eval_shape(run.tx.init, params)
    opt_state = jax.tree.map(describe, opt_state, run.state_shardings)
    batch = run.put(make_two_batches()[0])
    step = jax.jit(run.step).lower(params, opt_state, batch).compile()
    after = step(*run.start(), batch)
  sharding.assert_shardings_equal(after, (params, opt_state))
