"""All devices decide as one.

Under sharded jit, which has no names of axes, they exchange only a flag.
"""

import functools
import itertools

from helpers import exact_model, parametrize_slow, sharding
from helpers.bits import assert_same_bits
from helpers.devices import require_devices
from helpers.policy_models import AmaxRecorder
from helpers.sharded_runs import (
  JIT_LAYOUTS,
  SHARD_MAP_LAYOUTS,
  ShardedRun,
  ShardMapRun,
)
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols

STEPS = 50
without_check_vma = parametrize_slow("check_vma", [False], [True, False])


RUNS = [
  *itertools.product(
    [ShardedRun], JIT_LAYOUTS, [AxisType.Auto, AxisType.Explicit]
  ),
  *itertools.product([ShardMapRun], SHARD_MAP_LAYOUTS, [True, False]),
]


@pytest.mark.slow
@pytest.mark.parametrize("make_run, layout, option", RUNS)
def test_fifty_steps_on_eight_devices_equal_those_on_one(
  make_run, layout, option
):
  """With sharded jit, and with shard_map with and without check_vma."""
  run = make_run(layout, option)
  batches, finite = exact_model.make_batches(STEPS)
  params, opt_state, scales = run.train(batches)
  expected = exact_model.train_on_one_device(STEPS)
  assert_same_bits((params, opt_state, scales), expected)
  sharding.assert_replicas_equal((params, opt_state))
  state = ols.get_loss_scale_state(opt_state)
  assert state.total_notfinite == np.sum(~finite) > 5
  assert len(np.unique(scales)) > 3


SKIPS = [
  ("2x4", True),
  ("2x4", False),
  *((x, True) for x in list(JIT_LAYOUTS)[:3]),
]


@parametrize_slow(
  "axis_type", [AxisType.Explicit], [AxisType.Auto, AxisType.Explicit], ids=str
)
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
  # Both kinds of step keep the shardings.
  sharding.assert_shardings_equal(applied, start)
  sharding.assert_shardings_equal(skipped, start)
  assert_same_bits(skipped[0], applied[0])
  assert_same_bits(skipped[1].inner_state, applied[1].inner_state)
  assert np.any(applied[0]["table"] != start[0]["table"])
  state = ols.get_loss_scale_state(skipped)
  assert (state.loss_scale, state.last_finite) == (2.0**9, False)


@without_check_vma
@parametrize_slow("jitted", [True], [True, False])
def test_one_bad_entry_of_one_shard_makes_every_device_skip(jitted, check_vma):
  run = ShardMapRun("two axes, sharded", check_vma)
  update = run.sharded_update()
  update = jax.jit(update) if jitted else update
  params, opt_state = run.start()
  grads = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)
  grads["table"][5, 6] = np.nan
  new_params, new_state = update(grads, params, opt_state)
  assert_same_bits(new_params, params)
  assert_same_bits(new_state.inner_state, opt_state.inner_state)
  sharding.assert_replicas_equal((new_params, new_state))
  assert not new_state.loss_scale_state.last_finite


@parametrize_slow("scaled", [True], [False, True])
def test_max_norm_under_shard_map_is_the_norm_of_all_shards(scaled):
  options = {"max_norm": 2.5, "grads_are_scaled": scaled}
  options["inner"] = optax.sgd(1.0)
  run = ShardMapRun("two axes, sharded", True, **options)
  update = run.sharded_update()
  params, opt_state = run.start()
  rng = np.random.default_rng(0)
  grads = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in exact_model.SHAPES.items()
  }
  # A wrong norm is off by more than the leaves' shares of it.
  assert (
    5 < np.linalg.norm(np.concatenate([*map(np.ravel, grads.values())])) < 15
  )
  clip = optax.clip_by_global_norm(2.5)
  clipped, _ = jax.jit(clip.update)(grads, clip.init(params))
  expected = jax.tree.map(lambda p, g: np.asarray(p) - g, params, clipped)
  factor = float(opt_state.loss_scale_state.loss_scale) if scaled else 1
  given = jax.tree.map(lambda g: g * factor, grads)
  new_params, _ = jax.jit(update)(given, params, opt_state)
  for name, param in new_params.items():
    np.testing.assert_allclose(param, expected[name], rtol=1e-6, atol=1e-6)


def test_max_norm_counts_a_leaf_once_along_an_axis_that_holds_replicas():
  tx = ols.with_loss_scaling(
    optax.sgd(1.0), axis_name=("model", "data"), max_norm=1.0
  )
  specs = {"shard": P("data"), "whole": P()}
  update = jax.shard_map(
    lambda grads: tx.update(grads, tx.init(grads))[0],
    mesh=sharding.make_mesh((2, 4), ("data", "model")),
    in_specs=(specs,),
    out_specs=specs,
  )
  for x in jax.jit(update)(dict.fromkeys(specs, np.full(8, 3.0, "f"))).values():
    np.testing.assert_allclose(x, np.full(8, -0.25), rtol=1e-6)


@pytest.mark.parametrize("mapped", ["pmap", "vmap", "no check_vma"])
def test_max_norm_raises_if_no_type_identifies_shards(mapped):
  tx = ols.with_loss_scaling(optax.sgd(1.0), axis_name="data", max_norm=1.0)
  message = r"check_vma=True.*axis 'data'.*optax\.clip_by_global_norm"
  with pytest.raises(ValueError, match=message):
    map_over_axis(mapped, lambda g: tx.update(g, tx.init(g))[0])(
      np.ones((8, 2), np.float32)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["pmap", "vmap"])
def test_fifty_steps_under_pmap_and_vmap_equal_those_on_one_device(mapped):
  tx = exact_model.make_optimizer(axis_name="data")

  def step(params, opt_state, batch):
    one_example = {name: x[None] for name, x in batch.items()}
    grads = ols.grad(exact_model.loss_fn, opt_state)(params, one_example)
    updates, opt_state = tx.update(lax.psum(grads, "data"), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  train = lambda batches: exact_model.train(
    step, params := exact_model.init_params(), tx.init(params), batches
  )
  batches, _ = exact_model.make_batches(STEPS)
  by_device = {name: np.moveaxis(x, 1, 0) for name, x in batches.items()}
  replicas = map_over_axis(mapped, train)(by_device)
  for i in range(8):
    replica = jax.tree.map(lambda x, i=i: x[i], replicas)
    assert_same_bits(replica, exact_model.train_on_one_device(STEPS))


def update_on_8_devices(tx, grads, check_vma, **extra):
  """Each device has its own part of the extra arguments."""
  update = jax.shard_map(
    lambda grad, extra: tx.update(
      grad, tx.init(grad), **jax.tree.map(lambda x: x[0], extra)
    ),
    mesh=sharding.make_mesh((8,), ("data",)),
    in_specs=P("data"),
    out_specs=(P("data"), P()),
    check_vma=check_vma,
  )
  updates, state = jax.jit(update)(grads, extra)
  sharding.assert_replicas_equal(state)
  return updates, state.loss_scale_state


@without_check_vma
@pytest.mark.parametrize("says", ["the caller", "the optimizer"])
def test_what_one_device_says_counts_for_all(says, check_vma):
  extra = {"grads_finite": np.arange(8) != 3} if says == "the caller" else {}

  def break_on_shard_3(updates, params):
    is_bad = (lax.axis_index("data") == 3) & (says == "the optimizer")
    return jnp.where(is_bad, jnp.nan, updates)

  inner = optax.stateless(break_on_shard_3)
  tx = ols.with_loss_scaling(inner, axis_name="data", check_updates=True)
  grads = np.ones(8, np.float32)
  updates, state = update_on_8_devices(tx, grads, check_vma, **extra)
  assert np.all(np.signbit(updates)) and not np.any(updates)
  assert not state.last_finite


@without_check_vma
def test_a_policy_receives_the_largest_gradient_of_all_devices(check_vma):
  """The maximum of the gradients, or the one that one device receives."""
  tx = ols.with_loss_scaling(optax.sgd(1.0), AmaxRecorder(), axis_name="data")
  grads = np.float32([1.0, 2, 3, -9, 5, 6, 7, 8])
  grads_amax = np.float32([0, 1, 2, 3, 4, 12, 6, 7])
  for extra, seen in ({}, 9), ({"grads_amax": grads_amax}, 12):
    _, state = update_on_8_devices(tx, grads, check_vma, **extra)
    assert state.policy_state == seen


@parametrize_slow("policy", ["dynamic"], ["dynamic", "headroom"])
@parametrize_slow(
  "mapped", ["check_vma"], ["pmap", "vmap", "no check_vma", "check_vma"]
)
def test_a_step_with_a_shared_decision_can_be_differentiated_through(
  mapped, policy
):
  inner = optax.sgd(0.1, momentum=0.5)

  def after(w, axis_name):
    """A step, one that overflows on the fourth device, and another step."""
    tx = ols.with_loss_scaling(inner, policy, axis_name=axis_name)
    state, total = tx.init(w), w
    bad = jnp.where(lax.axis_index("data") == 3, jnp.inf, 0.0)
    for overflow in (0.0, bad, 0.0):
      updates, state = tx.update(total**2 + overflow, state, total)
      total = optax.apply_updates(total, updates)
    return total

  def bare(w):
    state, total = inner.init(w), w
    for _ in range(2):
      updates, state = inner.update(total**2, state, total)
      total = optax.apply_updates(total, updates)
    return total

  w = np.linspace(0.5, 2.0, 8, dtype=np.float32)
  slopes = map_over_axis(
    mapped, jax.grad(functools.partial(after, axis_name="data"))
  )
  expected = jax.jit(jax.vmap(jax.grad(bare)))(w)
  np.testing.assert_allclose(slopes(w), expected, rtol=1e-6)


def map_over_axis(mapped, fun):
  """Maps a function of an array of eight over axis "data", one for each."""
  if mapped == "pmap":
    require_devices(8)
    return jax.pmap(fun, axis_name="data")
  if mapped == "vmap":
    return jax.jit(jax.vmap(fun, axis_name="data"))
  on_each = jax.shard_map(
    lambda part: fun(part[0])[None],
    mesh=sharding.make_mesh((8,), ("data",)),
    in_specs=P("data"),
    out_specs=P("data"),
    check_vma=mapped == "check_vma",
  )
  return jax.jit(on_each)


@pytest.mark.slow
def test_vmapped_seeds_have_a_scale_and_a_flag_each():
  tx = exact_model.make_optimizer()
  step = functools.partial(exact_model.train_step, tx)
  train = jax.jit(lambda *args: exact_model.train(step, *args))
  seeds = [exact_model.make_batches(STEPS, seed)[0] for seed in range(4)]
  params = exact_model.init_params()
  start = params, tx.init(params)
  together = jax.vmap(train, in_axes=(None, None, 0))(
    *start, jax.tree.map(lambda *x: np.stack(x), *seeds)
  )
  skips = together[1].loss_scale_state.total_notfinite
  assert len(np.unique(skips)) > 1
  for i, batches in enumerate(seeds):
    member = jax.tree.map(lambda x, i=i: x[i], together)
    assert_same_bits(member, train(*start, batches))
