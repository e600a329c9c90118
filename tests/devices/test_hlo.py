"""The communication of a step, counted in the optimized programs."""

from collections import Counter
import functools

from helpers import exact_model, sharding
from helpers.sharded_runs import ShardedRun, ShardMapRun
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

ONE_ALL_REDUCE = Counter({"all-reduce": 1})
NOTHING = Counter()
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def scaled_adam(**options):
  return ols.with_loss_scaling(ADAM, **options)


SCALED = scaled_adam()


@pytest.mark.parametrize(
  "layout, tx, reference, gain",
  [
    # One for all leaves.
    ("fsdp", SCALED, ADAM, ONE_ALL_REDUCE),
    ("tensor parallel", SCALED, ADAM, ONE_ALL_REDUCE),
    # None if every device has all gradients, or if there is one already.
    ("data parallel", SCALED, ADAM, NOTHING),
    ("fsdp", scaled_adam(max_norm=1.0), CLIPPED, NOTHING),
    ("2x4", scaled_adam(max_norm=1.0), CLIPPED, NOTHING),
    ("fsdp", scaled_adam(grads_are_scaled=True), SCALED, NOTHING),
    ("2x4", scaled_adam(grads_are_scaled=True), SCALED, NOTHING),
  ],
)
def test_sharded_jit_adds_at_most_one_all_reduce(layout, tx, reference, gain):
  compiled, bare = (compile_jit(layout, x) for x in (tx, reference))
  assert compute_gain(compiled, bare) == gain


@pytest.mark.parametrize(
  "layout, check_vma, options, reductions",
  [
    ("replicated", True, {}, 0),  # types say that all agree
    ("replicated", False, {}, 1),
    ("sharded", True, {"max_norm": 1.0}, 1),
    ("sharded", False, {"loss_scale": "headroom"}, 1),
    ("replicated", True, {"max_norm": 1.0}, 0),
    ("sharded", True, {"grads_are_scaled": True}, 1),
    ("sharded", True, {"loss_scale": "headroom"}, 1),
  ],
  ids=str,
)
def test_shard_map_adds_at_most_one_all_reduce_for_any_arguments(
  layout, check_vma, options, reductions
):
  bare = compile_shard_map(layout, check_vma, ADAM)
  tx = scaled_adam(axis_name="data", **options)
  scaled = compile_shard_map(layout, check_vma, tx)
  assert compute_gain(scaled, bare) == Counter({"all-reduce": reductions})


def compute_gain(compiled, bare):
  """Return the additional collectives of a program, relative to another."""
  counts = sharding.count_wire_ops(compiled)
  counts.subtract(sharding.count_wire_ops(bare))
  return Counter({name: n for name, n in counts.items() if n})


def make_batch():
  """Return the examples of one step."""
  return {name: x[0] for name, x in exact_model.make_batches(1)[0].items()}


# The steps return no loss: XLA would merge the mean's all-reduce with the
# flag's, which are independent, and there would be nothing to count.
@functools.cache
def compile_jit(layout, tx):
  run = ShardedRun(layout, AxisType.Auto, tx)
  shardings = run.shardings, run.state_shardings
  with jax.set_mesh(run.mesh):
    step = jax.jit(run.step, out_shardings=shardings)
    return step.lower(*run.start(), run.put(make_batch())).compile()


@functools.cache
def compile_shard_map(layout, check_vma, tx):
  run = ShardMapRun(layout, check_vma, tx)
  step = run.shard_map(
    run.step, (*run.carry_specs, P(run.names)), run.carry_specs
  )
  return jax.jit(step).lower(*run.start(), make_batch()).compile()
