"""`autocast` among devices and transformations."""

import functools
import itertools

from helpers import jaxprs, parametrize_slow, sharding
from helpers.bits import assert_close, assert_functions_close, assert_same_bits
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np

import optax_lossscale as ols
from optax_lossscale._jaxprs import _eqns

X = jnp.float32(np.arange(32).reshape(8, 4) % 5 - 2)
W = jnp.float32(np.arange(16).reshape(4, 4) % 3 - 1)


def test_a_hessian_equals_the_float32_hessian():
  loss = lambda w: jnp.sum(jnp.tanh(X @ w / 4) ** 2)
  hessian, half = map(jax.hessian, (loss, ols.autocast(loss)))
  assert set(jaxprs.count_matmuls_by_dtype(half, W)) == {"float16"}
  assert_functions_close(half, hessian, W)


def test_a_checkpoint_around_autocast_saves_its_matmuls():
  loss = ols.autocast(lambda w: jnp.sum(jnp.tanh(jnp.tanh(X @ w) @ w)))
  policy = jax.checkpoint_policies.dots_saveable
  kept, all_kept = (
    jaxprs.count_matmuls_by_dtype(jax.grad(fun), W)
    for fun in (jax.checkpoint(loss, policy=policy), loss)
  )
  assert kept == all_kept


def test_a_checkpoint_inside_keeps_its_options():
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  layer = jax.checkpoint(lambda x: x @ W, prevent_cse=False, policy=policy)
  (eqn,) = jax.make_jaxpr(ols.autocast(layer))(X).eqns
  hidden = _eqns.get_hi_primitive(eqn)
  params = eqn.params if hidden is None else hidden.params
  assert params["policy"] is policy
  assert params["prevent_cse"] in (False, (False,))


AXIS_TYPES = AxisType.Auto, AxisType.Explicit


@parametrize_slow("axis_type", [AxisType.Explicit], AXIS_TYPES)
def test_shardings_are_kept(axis_type):
  mesh = sharding.make_mesh((4, 2), ("data", "model"), axis_type)
  specs = {"x": P("data", None), "w": P(None, "model")}
  shardings = sharding.to_named_shardings(mesh, specs)
  trees = sharding.put_on_devices({"x": X, "w": W}, shardings)
  inner = jax.jit(
    lambda x, w: jnp.tanh(x @ w),
    out_shardings=jax.NamedSharding(mesh, P("data", "model")),
  )

  def loss(tree):
    step = lambda c, _: (jnp.sin(c), None)
    y, _ = lax.scan(step, inner(tree["x"], tree["w"]), length=2)
    return jnp.sum(y), {"y": y, **tree}

  with jax.set_mesh(mesh):
    half, full = (jax.grad(f, has_aux=True) for f in (ols.autocast(loss), loss))
    actual, expected = jax.jit(half)(trees), jax.jit(full)(trees)
    sharding.assert_shardings_equal(actual, expected)
    assert_close(actual, expected)
    assert set(jaxprs.count_matmuls_by_dtype(half, trees)) == {"float16"}


MESHES = [*itertools.product(AXIS_TYPES, (False, True))]


@parametrize_slow("mesh", [(AxisType.Explicit, True)], MESHES, ids=str)
def test_shard_map_inside_and_outside_is_entered(mesh):
  axis_type, check_vma = mesh
  mesh = sharding.make_mesh((8,), ("data",), axis_type)
  shardings = sharding.to_named_shardings(mesh, (P("data"), P()))
  x, w = sharding.put_on_devices((X, W), shardings)

  def local_loss(x, w):
    y, _ = lax.scan(lambda c, _: (c @ w, None), x, length=2)
    return lax.pmean(jnp.sum(y), "data")

  mapped = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("data"), P()),
    out_specs=P(),
    check_vma=check_vma,
  )
  full = jax.grad(mapped(local_loss), (0, 1))
  inside = jax.grad(mapped(ols.autocast(local_loss)), (0, 1))
  outside = jax.grad(ols.autocast(mapped(local_loss)), (0, 1))
  run_all = jax.jit(lambda *args: [f(*args) for f in (full, inside, outside)])
  expected, *results = run_all(x, w)
  for half, actual in zip((inside, outside), results, strict=True):
    assert set(jaxprs.count_matmuls_by_dtype(half, x, w)) == {"float16"}
    assert_same_bits(actual, expected)
    sharding.assert_shardings_equal(actual, expected)
