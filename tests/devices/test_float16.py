"""Sums of float16 gradients over devices overflow sooner with more of them."""

from helpers import sharding
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols

# The scaled gradient of each device; three of them are more than float16 has.
PER_DEVICE = 24576.0
SCALE = 2.0**10
STATE = ols.FixedLossScale(SCALE).init()


@pytest.mark.parametrize(
  ("n_devices", "overflows"), [(1, False), (2, False), (4, True), (8, True)]
)
def test_a_float16_sum_over_devices_overflows_with_more_devices(
  n_devices, overflows
):
  """shard_map sums where the replicated parameter becomes a varying one.

  That is where it first meets the batch: behind the cast, in float16.
  """
  loss = lambda w, x: jnp.sum(w.astype(jnp.float16) * x).astype(jnp.float32)
  grad, dtypes = sum_over_devices(loss, n_devices)
  assert dtypes == {"float16"}
  assert np.isinf(grad) == overflows
  if not overflows:
    assert grad == n_devices * PER_DEVICE / SCALE


@pytest.mark.parametrize("n_devices", [1, 8])
def test_casting_a_varying_parameter_sums_in_float32(n_devices):
  def loss(w, x):
    w = to_varying(w)  # the cure
    return jnp.sum(w.astype(jnp.float16) * x).astype(jnp.float32)

  grad, dtypes = sum_over_devices(loss, n_devices)
  assert dtypes == {"float32"}
  assert grad == n_devices * PER_DEVICE / SCALE


@pytest.mark.parametrize("n_devices", [1, 8])
def test_a_mean_per_device_before_the_sum_fits_any_number_of_devices(n_devices):
  def loss(w, x):
    loss = jnp.sum(w.astype(jnp.float16) * x).astype(jnp.float32)
    return loss / lax.axis_size("data")  # the cure

  grad, dtypes = sum_over_devices(loss, n_devices)
  assert dtypes == {"float16"}
  assert grad == PER_DEVICE / SCALE


@pytest.mark.parametrize("is_mean", [False, True])
def test_under_jit_the_mean_over_the_whole_batch_is_the_cure(is_mean):
  """jit has no varying parameters; the sum stays in float16, and small."""
  mesh = sharding.make_mesh((8,), ("data",), AxisType.Auto)

  def loss(w, x):
    losses = (w.astype(jnp.float16) * x).astype(jnp.float32)
    return jnp.mean(losses) if is_mean else jnp.sum(losses)

  x = jax.device_put(make_examples(8), sharding.named(mesh, P("data")))
  w = jax.device_put(jnp.float32(1), sharding.named(mesh, P()))
  grad = jax.jit(lambda w, x: ols.grad(loss, STATE)(w, x))(w, x)
  assert grad == PER_DEVICE / SCALE if is_mean else np.isinf(grad)


def test_gradients_widened_before_a_psum_by_hand_are_summed_in_float32():
  """check_vma=False and pmap: what ols.grad returns is float32 already."""
  loss = lambda w, x: jnp.sum(w.astype(jnp.float16) * x).astype(jnp.float32)
  mesh = sharding.make_mesh((8,), ("data",))
  fun = jax.shard_map(
    lambda w, x: lax.psum(ols.grad(loss, STATE)(w, x), "data"),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P(),
    check_vma=False,
  )
  for w in (jnp.float32(1), jnp.float16(1)):
    grad = jax.jit(fun)(w, make_examples(8))
    assert (grad.dtype, grad) == (jnp.float32, 8 * PER_DEVICE / SCALE)


def sum_over_devices(loss, n_devices):
  """The gradient under shard_map, and the dtypes of the sums in it."""
  mesh = jax.make_mesh(
    (n_devices,),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:n_devices],
  )
  fun = jax.shard_map(
    lambda w, x: ols.grad(loss, STATE)(w, x),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P(),
  )
  args = jnp.float32(1), make_examples(n_devices)
  grad = jax.jit(fun)(*args)
  jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
  return grad, {str(eqn.invars[0].aval.dtype) for eqn in sums(jaxpr)}


def to_varying(x):
  if hasattr(lax, "pcast"):
    return lax.pcast(x, "data", to="varying")
  return lax.pvary(x, "data")  # its name in JAX 0.8.0


def make_examples(n_devices):
  return np.full(n_devices, PER_DEVICE / SCALE, np.float16)


def sums(jaxpr):
  """The equations that sum over devices, at any depth."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name.startswith("psum"):
      yield eqn
    for param in eqn.params.values():
      inner = getattr(param, "jaxpr", param)
      if hasattr(inner, "eqns"):
        yield from sums(inner)
