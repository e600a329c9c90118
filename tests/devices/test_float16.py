"""Sums of float16 gradients over devices overflow sooner with more of them."""

from helpers import jaxprs, sharding
from helpers.bits import assert_same_bits, flatten, relative_error
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
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
  found, dtypes = compute_device_sum(loss, n_devices)
  assert dtypes == {dtype}
  assert found == grad / SCALE


@pytest.mark.parametrize("is_mean", [False, True])
def test_under_jit_the_mean_over_the_whole_batch_is_the_fix(is_mean):
  """jit has no varying parameters; the sum stays in float16, and small."""
  mesh = sharding.make_mesh((8,), ("data",), AxisType.Auto)

  def loss(w, x):
    losses = (w.astype(jnp.float16) * x).astype(jnp.float32)
    return jnp.mean(losses) if is_mean else jnp.sum(losses)

  x = jax.device_put(
    make_examples(8), sharding.to_named_shardings(mesh, P("data"))
  )
  w = jax.device_put(jnp.float32(1), sharding.to_named_shardings(mesh, P()))
  grad = jax.jit(lambda w, x: ols.grad(loss, STATE)(w, x))(w, x)
  assert grad == PER_DEVICE / SCALE if is_mean else np.isinf(grad)


def test_gradients_cast_to_float32_before_a_psum_are_summed_in_float32():
  """check_vma=False and pmap: what ols.grad returns is float32 already."""
  sum_grads = lambda w, x: lax.psum(ols.grad(sum_in_half, STATE)(w, x), "data")
  fun = map_to_8_devices(sum_grads, (P(), P("data")))
  for w in (np.float32(1), np.float16(1)):
    grad = fun(w, make_examples(8))
    assert (grad.dtype, grad) == (jnp.float32, 8 * PER_DEVICE / SCALE)


# The recipe of the page on many devices: the sum over devices in float16, of
# gradients that keep the scale. As one worker of many, whose parts are small.
PART = 2.0**-24


def small_loss(params, batch):
  """Computes in the dtype of the parameters; the loss is float32."""
  x, y = batch
  for w in params[:-1]:
    x = jnp.tanh(x.astype(w.dtype) @ w)
  error = (x @ params[-1]).astype(jnp.float32) - y
  return PART * jnp.mean(error**2)


def to_half(params):
  return [w.astype(jnp.float16) for w in params]


def sum_scaled(params, state, batch):
  """The recipe."""
  scaled_loss = lambda half: ols.scale_loss(small_loss(half, batch), state)
  grads = jax.grad(scaled_loss)(to_half(params))
  n_devices = lax.axis_size("data")
  return [lax.psum(g / n_devices, "data") for g in grads]


def sum_true(dtype):
  """The sum of true gradients, in float32, or in a dtype that loses them."""

  def fun(params, state, batch):
    loss = lambda params: small_loss(to_half(params), batch)
    grads = ols.grad(loss, state)(params)
    return [lax.pmean(g.astype(dtype), "data") for g in grads]

  return fun


def map_to_8_devices(fun, *args):
  return sharding.map_step(fun, sharding.make_mesh((8,), ("data",)), *args)


def make_params_and_batch():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  shapes = (16, 32), (32, 32), (32, 4)
  params = [normal(*shape) / np.float32(np.sqrt(shape[0])) for shape in shapes]
  return params, (normal(64, 16), np.ones((64, 4), np.float32))


@pytest.mark.slow
def test_a_float16_sum_that_keeps_the_scale_is_nearly_as_good_as_float32():
  params, batch = make_params_and_batch()
  exact = flatten(jax.jit(jax.grad(small_loss))(params, batch))
  scale = 2.0**30

  def compare(fun, dtype, unscale=1.0):
    """Return the error, and the fraction of gradients that are flushed."""
    args = params, ols.FixedLossScale(scale).init(), batch
    assert list_sum_dtypes(map_to_8_devices(fun), *args) == {dtype}
    grads = flatten(map_to_8_devices(fun)(*args)) / unscale
    return relative_error(exact, grads), np.mean(grads[exact != 0] == 0)

  error, flushed = compare(sum_scaled, "float16", unscale=scale)
  assert error < 1e-3 and flushed < 1e-4
  assert error < 1.5 * compare(sum_true(jnp.float32), "float32")[0]
  # With unscaled gradients, the sum loses all of them.
  assert compare(sum_true(jnp.float16), "float16")[1] == 1


def test_a_sum_that_keeps_the_scale_trains_and_skips_on_all_devices():
  params, batch = make_params_and_batch()
  bad = batch[0].copy(), batch[1]
  bad[0][3] = np.inf  # on the first device alone
  tx = ols.with_loss_scaling(
    optax.sgd(1 / PART), 2.0**28, grads_are_scaled=True, axis_name="data"
  )

  def step(params, opt_state, batch):
    grads = sum_scaled(params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  opt_state = tx.init(params)
  step = map_to_8_devices(step)
  after = step(params, opt_state, bad)
  assert_same_bits(after[0], params)
  assert ols.get_loss_scale_state(after).total_notfinite == 1

  after, _ = step(params, opt_state, batch)
  grads = jax.jit(jax.grad(small_loss))(params, batch)
  exact = [w - np.asarray(g) / PART for w, g in zip(params, grads, strict=True)]
  for mine, theirs in zip(after, exact, strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-3)


def compute_device_sum(loss, n_devices):
  """The gradient under shard_map, and the dtypes of the sums in it."""
  mesh = sharding.make_mesh((n_devices,), ("data",))
  compute = lambda w, x: ols.grad(loss, STATE)(w, x)
  fun = sharding.map_step(compute, mesh, (P(), P("data")), check_vma=True)
  args = np.float32(1), make_examples(n_devices)
  return fun(*args), list_sum_dtypes(fun, *args)


def make_examples(n_devices):
  return np.full(n_devices, PER_DEVICE / SCALE, np.float16)


def list_sum_dtypes(fun, *args):
  """Return the dtypes of equations that sum over devices, at any depth."""
  return {
    str(eqn.invars[0].aval.dtype)
    for eqn in jaxprs.list_eqns(fun, *args)
    if eqn.primitive.name.startswith("psum")
  }
