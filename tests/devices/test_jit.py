"""Sharded jit without axis names, in which devices exchange only a flag.

test_shard_map.py compares whole runs with those of one device.
"""

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
  batches, _ = exact_model.make_batches(2, overflows=0)
  batches["table"][1, 3, 5, 6] = exact_model.OVERFLOWING
  batch, overflow = (
    {name: x[i] for name, x in batches.items()} for i in (0, 1)
  )
  step = jax.jit(run.step) if jitted else run.step
  with jax.set_mesh(run.mesh):
    start, batch, overflow = run.start(), run.put(batch), run.put(overflow)
    with jax.transfer_guard("disallow" if jitted else "allow"):
      applied = step(*start, batch)
      skipped = step(*applied, overflow)
  if case == SKIPS[0]:  # In the others, JAX writes P("data") as another spec.
    assert step._cache_size() == 1
  sharding.assert_replicas_equal((applied, skipped))
  # Sharded as it was, on both kinds of step.
  sharding.assert_shardings_equal(applied, start)
  sharding.assert_shardings_equal(skipped, start)
  assert_same_bits(skipped[0], applied[0])
  assert_same_bits(skipped[1].inner_state, applied[1].inner_state)
  assert np.any(applied[0]["table"] != start[0]["table"])
  state = ols.get_loss_scale_state(skipped)
  assert (state.loss_scale, state.last_finite) == (2.0**9, False)
