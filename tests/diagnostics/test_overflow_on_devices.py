"""``find_overflow`` enters what runs on several devices."""

from helpers import sharding
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from optax_lossscale.diagnostics import find_overflow

X = jnp.linspace(-2, 2, 8, dtype=jnp.float16).reshape(2, 4)


def get_names(hit):
  return [hit.primitive, *(other.primitive for other in hit.other_origins)]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", list(AxisType)[:2])
def test_a_scan_inside_shard_map_is_entered(axis_type, check_vma):
  mesh = sharding.make_mesh((2, 2), ("a", "b"), axis_type)

  def body(x, i):
    is_here = (i == 2) & (lax.axis_index("a") == 1)
    return x * jnp.where(is_here, 6e4, 1).astype(x.dtype), x

  def part(w, x):
    x, _ = lax.scan(body, x @ w, jnp.arange(4))
    return lax.pmean(jnp.sum(x.astype(jnp.float32) ** 2), ("a", "b"))

  spec = P(("a", "b"))
  loss_fn = jax.shard_map(
    part, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=check_vma
  )
  args = sharding.put_on_devices(
    (3 * jnp.eye(4, dtype=X.dtype), jnp.ones((8, 4), X.dtype)),
    sharding.to_named_shardings(mesh, (P(), spec)),
  )
  fun = jax.value_and_grad(loss_fn)
  skip_if_jax_cannot(jax.jit(fun), *args)

  hit = find_overflow(jax.jit(fun), *args)
  assert hit.eqn_path.endswith("shard_map/scan[2]/mul")
  assert hit.inputs[0] == ((2, 4), np.float16, 3.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["cond", "while"])
def test_a_branch_and_a_loop_that_differ_among_devices_are_entered(loop):
  """The devices take different branches, or do not stop together."""
  mesh = sharding.make_mesh((4,), ("data",))

  def part(x):
    i = lax.axis_index("data")
    if loop == "cond":
      return lax.cond(i == 2, lambda x: (x * 60000, x / 0), lambda x: (x, x), x)
    flags = i > jnp.arange(3)
    step = lambda state: (state[0] + 1, state[1] * 200, flags)
    return lax.while_loop(lambda s: s[0] < 3, step, (i, x, flags))[1]

  fun = jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  hit = find_overflow(fun, jnp.full((8, 4), 2, X.dtype))
  path = "cond(branch 1)/mul" if loop == "cond" else "while[1]/mul"
  assert hit.eqn_path == f"shard_map/{path}"
  assert get_names(hit)[1:] == (["div"] if loop == "cond" else [])


@pytest.mark.slow
@pytest.mark.parametrize("factor, names", [(1, []), (60000, ["dot_general"])])
def test_a_branch_may_compute_what_is_the_same_on_all_devices(factor, names):
  mesh = sharding.make_mesh((4,), ("data",))

  def part(w, x):
    in_branch = lambda: x + jnp.sum(w @ w).astype(x.dtype)
    return lax.cond(lax.axis_index("data") == 2, in_branch, lambda: x)

  specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
  fun = jax.shard_map(part, mesh=mesh, **specs)
  w = factor * jnp.ones((2, 2), X.dtype)
  hit = find_overflow(fun, w, jnp.ones((8, 4), X.dtype))
  assert (get_names(hit) if hit else []) == names


@pytest.mark.slow
def test_a_mesh_without_devices_is_not_entered():
  mesh = sharding.make_mesh((4,), ("data",))
  part = lambda x: jnp.exp(x * 20)
  with jax.set_mesh(mesh):
    fun = jax.shard_map(part, in_specs=P("data"), out_specs=P("data"))
    hit = find_overflow(jax.jit(fun), jnp.ones((8, 4), X.dtype))
  assert hit.primitive in ("shard_map", "exp")


@pytest.mark.slow
def test_a_loop_over_arrays_whose_types_are_sharded_is_followed():
  mesh = sharding.make_mesh((4,), ("data",), AxisType.Explicit)
  ones = jnp.ones((4, 3), X.dtype)
  (x,) = sharding.put_on_devices(
    (ones,), sharding.to_named_shardings(mesh, (P("data"),))
  )

  def scan(x):
    step = lambda x, i: (x * jnp.where(i == 2, 60000, 2).astype(x.dtype), x)
    return lax.scan(step, x, jnp.arange(4))

  def while_loop(x):
    body = lambda state: (state[0] + 1, state[1] * 64)
    return lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

  for fun in scan, while_loop:
    skip_if_jax_cannot(jax.jit(fun), x)
    hit = find_overflow(fun, x)
    assert hit.eqn_path in ("scan[2]/mul", "while[2]/mul")
    assert find_overflow(fun, x / 2**24) is None


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_collective_is_blamed_only_for_an_inf_of_its_own(check_vma):
  mesh = sharding.make_mesh((4,), ("data",))

  def part(x):
    is_third = lax.axis_index("data") == 2
    y = jnp.square(x * jnp.where(is_third, 300, 1).astype(x.dtype))
    y = lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])
    return lax.psum(lax.all_gather(y, "data", tiled=True), "data")

  def fun(x):
    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.shard_map(part, mesh=mesh, check_vma=check_vma, **specs)(x)

  x = jnp.ones((8, 4), X.dtype)
  assert get_names(find_overflow(fun, x)) == ["square"]
  (name,) = get_names(find_overflow(fun, x * 0.6 * 256 / 300))[:1]
  assert name.startswith("psum")


@pytest.mark.slow
@pytest.mark.skipif(
  jax.__version_info__ < (0, 12),
  reason="JAX takes each result of an optimization_barrier for varying",
)
def test_a_result_that_is_the_same_on_all_devices_remains_so():
  mesh = sharding.make_mesh((4,), ("data",))

  def part(w, x):
    # It only moves data, but nothing else leads to the result.
    _, _, inf = lax.optimization_barrier((w, x, np.float16(np.inf)))
    return lax.broadcast(inf, (2,))

  specs = {"in_specs": (P(), P("data")), "out_specs": P()}
  fun = jax.shard_map(part, mesh=mesh, **specs)
  x = jnp.ones((8, 4), X.dtype)
  assert get_names(find_overflow(fun, x[:2], x)) == ["optimization_barrier"]
