"""shard_map, pmap and vmap: the axes are named, and all decide as one."""

import functools

from helpers import exact_model, sharding
from helpers.bits import assert_same_bits
from helpers.sharded_runs import SHARD_MAP_LAYOUTS, ShardMapRun
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols

STEPS = 50
SHARDED = P("data")
both_check_vma = pytest.mark.parametrize("check_vma", [True, False])
mapped_axes = pytest.mark.parametrize("mapped", ["pmap", "vmap"])


@pytest.mark.slow
@both_check_vma
@pytest.mark.parametrize("layout", SHARD_MAP_LAYOUTS)
def test_fifty_steps_under_shard_map_are_those_on_one_device(layout, check_vma):
  run = ShardMapRun(layout, check_vma)
  batches, finite = exact_model.make_batches(STEPS)
  params, opt_state, scales = run.train(batches)
  assert_same_bits((params, opt_state, scales), exact_model.one_device(STEPS))
  sharding.assert_replicas_equal((params, opt_state))
  state = ols.get_loss_scale_state(opt_state)
  assert state.total_notfinite == np.sum(~finite) > 5


@both_check_vma
@pytest.mark.parametrize(
  ("bad", "jitted"),
  [
    (np.nan, True),
    (-np.inf, True),
    pytest.param(np.inf, False, marks=pytest.mark.slow),
  ],
)
def test_one_bad_entry_of_one_shard_makes_every_device_skip(
  bad, jitted, check_vma
):
  run = ShardMapRun("two axes, sharded", check_vma)
  update = run.sharded_update()
  update = jax.jit(update) if jitted else update
  params, opt_state = run.start()
  grads = jax.tree.map(jnp.ones_like, params)
  grads["table"] = grads["table"].at[5, 6].set(bad)
  new_params, new_state = update(grads, params, opt_state)
  assert_same_bits(new_params, params)
  assert_same_bits(new_state.inner_state, opt_state.inner_state)
  sharding.assert_replicas_equal((new_params, new_state))
  assert not new_state.loss_scale_state.last_finite


@pytest.mark.parametrize("scaled", [False, True])
def test_max_norm_under_shard_map_is_the_norm_of_the_whole(scaled):
  options = {"max_norm": 2.5, "grads_are_scaled": scaled}
  run = ShardMapRun("two axes, sharded", True, sgd=True, **options)
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
  clipped, _ = clip.update(grads, clip.init(params))
  expected = jax.tree.map(lambda p, g: p - g, params, clipped)
  factor = opt_state.loss_scale_state.loss_scale if scaled else 1
  given = jax.tree.map(lambda g: g * factor, grads)
  new_params, _ = jax.jit(update)(given, params, opt_state)
  for name, param in new_params.items():
    np.testing.assert_allclose(param, expected[name], rtol=1e-6, atol=1e-6)


def test_max_norm_counts_a_leaf_once_along_axes_that_are_not_named():
  """Sharded over data alone, with both axes named, and the other way round."""
  mesh = sharding.make_mesh((2, 4), ("data", "model"))
  tx = ols.with_loss_scaling(
    optax.sgd(1.0), axis_name=("model", "data"), max_norm=1.0
  )
  for spec in (P("data"), P("model"), P(), P(("data", "model"))):

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def update(grad):
      return tx.update(grad, tx.init(grad))[0]

    updates = jax.jit(update)(jnp.full(16, 3.0))
    np.testing.assert_allclose(updates, np.full(16, -0.25), rtol=1e-6)


def test_max_norm_counts_a_leaf_once_on_a_mesh_of_one_device():
  tx = ols.with_loss_scaling(optax.sgd(1.0), axis_name="data", max_norm=1.0)
  grads = {"shard": jnp.full(2, 3.0), "whole": jnp.full(2, 4.0)}
  specs = {"shard": P("data"), "whole": P()}
  update = jax.shard_map(
    lambda grads: tx.update(grads, tx.init(grads), grads)[0],
    mesh=sharding.make_mesh((1,), ("data",)),
    in_specs=(specs,),
    out_specs=specs,
  )
  updates = jax.jit(update)(grads)
  norm = np.sqrt(2 * 3.0**2 + 2 * 4.0**2)
  np.testing.assert_allclose(updates["shard"], -3 / norm, rtol=1e-6)
  np.testing.assert_allclose(updates["whole"], -4 / norm, rtol=1e-6)


def test_max_norm_is_an_error_where_check_vma_hides_what_is_a_shard():
  run = ShardMapRun("sharded", False, max_norm=1.0)
  update = run.sharded_update()
  params, opt_state = run.start()
  with pytest.raises(ValueError, match=r"check_vma=True.*axis 'data'"):
    jax.jit(update)(params, params, opt_state)


@mapped_axes
def test_max_norm_is_an_error_under_pmap_and_vmap(mapped):
  tx = ols.with_loss_scaling(optax.sgd(1.0), axis_name="data", max_norm=1.0)
  update = lambda g: tx.update(g, tx.init(g))[0]
  with pytest.raises(ValueError, match=r"optax\.clip_by_global_norm"):
    map_over("data", mapped, update)(jnp.ones((8, 2)))


@mapped_axes
def test_the_cure_for_that_error_clips_averaged_gradients(mapped):
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
  tx = ols.with_loss_scaling(inner, axis_name="data")

  def update(grad):
    return tx.update(lax.pmean(grad, "data"), tx.init(grad))[0]

  grads = jnp.arange(8.0)[:, None] * jnp.array([0.0, 3.0])
  updates = map_over("data", mapped, update)(grads)
  np.testing.assert_allclose(updates, np.tile([0.0, -1.0], (8, 1)), rtol=1e-6)


@mapped_axes
def test_fifty_steps_under_pmap_and_vmap_are_those_on_one_device(mapped):
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
  replicas = map_over("data", mapped, train)(by_device)
  for i in range(8):
    replica = jax.tree.map(lambda x, i=i: x[i], replicas)
    assert_same_bits(replica, exact_model.one_device(STEPS))


@mapped_axes
def test_one_bad_replica_under_pmap_and_vmap_makes_all_skip(mapped):
  tx = exact_model.make_optimizer(axis_name="data")
  update = lambda g: tx.update(g, tx.init(g))
  grads = jnp.ones((8, 2)).at[3, 1].set(jnp.inf)
  updates, state = map_over("data", mapped, update)(grads)
  assert np.all(np.signbit(updates)) and not np.any(updates)
  assert not np.any(state.loss_scale_state.last_finite)
  # Without a name each decides alone, and replicas part.
  alone = exact_model.make_optimizer()
  _, state = map_over("data", mapped, lambda g: alone.update(g, alone.init(g)))(
    grads
  )
  assert np.sum(state.loss_scale_state.last_finite) == 7


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


def update_on_8_devices(tx, grads, check_vma, spec=SHARDED, **extra):
  """Each device has its own part of the extra arguments."""
  update = jax.shard_map(
    lambda grad, extra: tx.update(
      grad, tx.init(grad), **jax.tree.map(lambda x: x[0], extra)
    ),
    mesh=sharding.make_mesh((8,), ("data",)),
    in_specs=(spec, P("data")),
    out_specs=(spec, P()),
    check_vma=check_vma,
  )
  updates, state = jax.jit(update)(grads, extra)
  sharding.assert_replicas_equal(state)
  return updates, state.loss_scale_state


@both_check_vma
def test_a_callers_flag_from_one_device_counts_for_all(check_vma):
  tx = exact_model.make_optimizer(axis_name="data")
  updates, state = update_on_8_devices(
    tx, jnp.ones(2), check_vma, P(), grads_finite=np.arange(8) != 3
  )
  assert np.all(np.signbit(updates)) and not np.any(updates)
  assert not state.last_finite


@both_check_vma
def test_a_nan_that_one_devices_optimizer_made_counts_for_all(check_vma):
  def break_on_shard_3(updates, state, params=None):
    del params
    is_bad = lax.axis_index("data") == 3
    return jnp.where(is_bad, jnp.nan, updates), state

  inner = optax.GradientTransformation(lambda _: (), break_on_shard_3)
  tx = ols.with_loss_scaling(inner, axis_name="data", check_updates=True)
  updates, state = update_on_8_devices(tx, jnp.ones(8), check_vma)
  assert np.all(np.signbit(updates)) and not np.any(updates)
  assert not state.last_finite


@both_check_vma
def test_a_policy_is_given_the_largest_gradient_of_all_devices(check_vma):
  """That of the gradients, or the one that one device was told of."""
  policy = ScaleIsMagnitude()
  tx = ols.with_loss_scaling(optax.sgd(1.0), policy, axis_name="data")
  grads = jnp.array([1.0, 2, 3, -9, 5, 6, 7, 8])
  told = jnp.arange(8.0).at[5].set(12)
  for extra, seen in ({}, 9), ({"grads_amax": told}, 12):
    _, state = update_on_8_devices(tx, grads, check_vma, **extra)
    assert state.loss_scale == seen


def map_by(mapped, fun):
  """Maps a function of an array of eight over axis "data", one for each."""
  if mapped in ("pmap", "vmap"):
    return map_over("data", mapped, fun)
  mesh = sharding.make_mesh((8,), ("data",))
  specs = {"in_specs": P("data"), "out_specs": P("data")}
  fun_of_part = lambda part: fun(part[0])[None]
  return jax.shard_map(
    fun_of_part, mesh=mesh, check_vma=mapped == "check_vma", **specs
  )


@pytest.mark.parametrize("policy", ["dynamic", ols.HeadroomLossScale()])
@pytest.mark.parametrize(
  "mapped", ["pmap", "vmap", "no check_vma", "check_vma"]
)
def test_a_step_that_is_decided_together_can_be_differentiated_through(
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

  w = jnp.linspace(0.5, 2.0, 8)
  slopes = map_by(mapped, jax.grad(functools.partial(after, axis_name="data")))
  # Compiled: eagerly each operation is one of eight devices, one by one.
  slopes = slopes if mapped == "pmap" else jax.jit(slopes)
  np.testing.assert_allclose(slopes(w), jax.vmap(jax.grad(bare))(w), rtol=1e-6)


class ScaleIsMagnitude(ols.DynamicLossScale):
  """No sound policy, but one that shows what it was given."""

  def adjust(self, state, grads_finite, *, grads_amax=None):
    state = super().adjust(state, grads_finite)
    return state._replace(loss_scale=grads_amax)


def map_over(axis_name, mapped, fun):
  if mapped == "pmap":
    return jax.pmap(fun, axis_name=axis_name)
  return jax.jit(jax.vmap(fun, axis_name=axis_name))
