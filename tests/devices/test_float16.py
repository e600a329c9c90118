"""Sums of float16 gradients over devices overflow sooner with more of them."""

from helpers import jaxprs, sharding
from helpers.bits import assert_same_bits
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale._jaxprs import _primitives

# The scaled gradient of each device; three of them are more than float16 has.
PER_DEVICE = 24576.0
SCALE = 2.0**10
STATE = ols.FixedLossScale(SCALE).init()


def sum_in_half(w, x):
  return jnp.sum(w.astype(jnp.float16) * x).astype(jnp.float32)


def sum_after_varying(w, x):
  return sum_in_half(_primitives.cast_to_varying(w, "data"), x)


def mean_in_half(w, x):
  return sum_in_half(w, x) / lax.axis_size("data")


# The devices, the dtype of the sum over them, and the gradient.
SUMS = [
  (sum_in_half, 1, "float16", PER_DEVICE),
  (sum_in_half, 2, "float16", 2 * PER_DEVICE),
  (sum_in_half, 4, "float16", np.inf),
  (sum_after_varying, 1, "float32", PER_DEVICE),
  (sum_after_varying, 8, "float32", 8 * PER_DEVICE),
  (mean_in_half, 1, "float16", PER_DEVICE),
  (mean_in_half, 8, "float16", PER_DEVICE),
]


@pytest.mark.parametrize(
  ("loss", "n_devices", "dtype", "grad"),
  [
    pytest.param(*row, marks=[pytest.mark.accelerator] if row[1] == 1 else [])
    for row in SUMS
  ],
)
def test_a_float16_sum_over_devices_overflows_with_more_devices(
  loss, n_devices, dtype, grad
):
  """shard_map sums where the replicated parameter becomes a varying one.

  That is where it first meets the batch: behind the cast, in float16. If it
  varies before the cast, or the loss is a mean, any number of devices will do.
  """
  mesh = sharding.make_mesh((n_devices,), ("data",))
  compute = lambda w, x: ols.grad(loss, STATE)(w, x)
  fun = sharding.map_step(compute, mesh, (P(), P("data")), check_vma=True)
  args = np.float32(1), make_examples(n_devices)
  assert list_sum_dtypes(fun, *args) == {dtype}
  assert fun(*args) == grad / SCALE


def test_gradients_cast_to_float32_before_a_psum_are_summed_in_float32():
  """check_vma=False and pmap: what ols.grad returns is float32 already."""
  sum_grads = lambda w, x: lax.psum(ols.grad(sum_in_half, STATE)(w, x), "data")
  fun = map_to_8_devices(sum_grads, (P(), P("data")))
  for w in (np.float32(1), np.float16(1)):
    grad = fun(w, make_examples(8))
    assert (grad.dtype, grad) == (jnp.float32, 8 * PER_DEVICE / SCALE)


def test_a_sum_that_keeps_the_scale_trains_and_skips_on_all_devices():
  """The recipe of the page on many devices, on gradients below float16."""
  size = 2.0**-24
  tx = ols.with_loss_scaling(
    optax.sgd(1 / size), 2.0**28, grads_are_scaled=True, axis_name="data"
  )

  def loss_fn(w, x):
    return size * jnp.mean((x.astype(w.dtype) @ w).astype(jnp.float32) ** 2)

  def step(w, opt_state, x):
    scaled_loss = lambda half: ols.scale_loss(loss_fn(half, x), opt_state)
    grads = jax.grad(scaled_loss)(w.astype(jnp.float16))
    grads = lax.psum(grads / lax.axis_size("data"), "data")
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state

  step = map_to_8_devices(step)
  w, x = np.eye(16, 4, dtype=np.float32), np.linspace(-1, 1, 1024)
  x = x.reshape(64, 16).astype(np.float32)
  args = w, tx.init(w)
  assert list_sum_dtypes(step, *args, x) >= {"float16"}
  grads = jax.jit(jax.grad(loss_fn))(w, x)
  np.testing.assert_allclose(step(*args, x)[0], w - grads / size, atol=1e-3)
  x[3] = np.inf  # on the first device alone
  new, opt_state = step(*args, x)
  assert_same_bits(new, w)
  assert ols.get_loss_scale_state(opt_state).total_notfinite == 1


def map_to_8_devices(fun, *args):
  return sharding.map_step(fun, sharding.make_mesh((8,), ("data",)), *args)


def make_examples(n_devices):
  return np.full(n_devices, PER_DEVICE / SCALE, np.float16)


def list_sum_dtypes(fun, *args):
  """Return the dtypes of equations that sum over devices, at any depth."""
  return {
    str(eqn.invars[0].aval.dtype)
    for eqn in jaxprs.list_eqns(fun, *args)
    if eqn.primitive.name.startswith("psum")
  }
