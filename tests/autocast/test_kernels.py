"""Kernels that take half precision alone, in a float32 model: the recipe.

This kernel is of Pallas, which is interpreted here. That of cuDNN is compiled
for an H100 by `tests/devices/test_compilers.py`.
"""

from helpers.bits import assert_close
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

STATE = ols.DynamicLossScale().init()
HALF = jnp.float16
KEYS = jax.random.split(jax.random.key(0), 3)
INPUT, *WEIGHTS = (jax.random.normal(key, (8, 8)) / 2 for key in KEYS)
PARAMS = dict(zip(("w", "head"), WEIGHTS, strict=True))


def multiply(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def forward_kernel(x, w, out):
  out[:] = jnp.tanh(multiply(x[:], w[:])).astype(HALF)


def backward_kernel(x, w, g, dx, dw):
  y = jnp.tanh(multiply(x[:], w[:]))
  d = (g[:] * (1 - y**2)).astype(HALF)
  dx[:] = multiply(d, w[:].T).astype(HALF)
  dw[:] = multiply(x[:].T, d).astype(HALF)


def call(kernel, outputs, *args):
  for x in args:
    if x.dtype != HALF:
      raise TypeError(f"the kernel takes float16, got {x.dtype}")
  out_shape = [jax.ShapeDtypeStruct((8, 8), HALF)] * outputs
  return pl.pallas_call(kernel, out_shape=out_shape, interpret=True)(*args)


@jax.custom_vjp
def half_layer(x, w):
  return call(forward_kernel, 1, x, w)[0]


half_layer.defvjp(
  lambda *xw: (half_layer(*xw), xw),
  lambda xw, g: tuple(call(backward_kernel, 2, *xw, g)),
)


def recipe(x, w):
  x_half, w_half = (a.astype(jnp.float16) for a in (x, w))
  return half_layer(x_half, w_half).astype(x.dtype)


def loss_with(layer):
  return lambda params, x: jnp.mean(
    (layer(x, params["w"]) @ params["head"]) ** 2
  )


def test_a_float16_kernel_refuses_float32_also_inside_of_autocast():
  for loss_fn in loss_with(half_layer), ols.autocast(loss_with(half_layer)):
    with pytest.raises(TypeError, match="takes float16, got float32"):
      loss_fn(PARAMS, INPUT)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tolerance"), [(1.0, 5e-3), (1e-7, 0.05)])
def test_a_kernel_between_casts_has_the_float32_gradient(size, tolerance):
  """Gradients of 1e-7 would be lost in float16 without the loss scale."""
  scaled = lambda layer: lambda *args: size * loss_with(layer)(*args)
  grads = ols.grad(ols.autocast(scaled(recipe)), STATE)(PARAMS, INPUT)
  expected = jax.grad(scaled(lambda x, w: jnp.tanh(x @ w)))(PARAMS, INPUT)
  assert_close(grads["w"], expected["w"], tolerance)
  unscaled = jax.grad(ols.autocast(scaled(recipe)))(PARAMS, INPUT)
  assert jnp.any(unscaled["w"]) == (size == 1)


def test_all_matmuls_around_the_kernel_are_float16_without_a_warning():
  grad_fn = ols.grad(ols.autocast(loss_with(recipe)), STATE)
  # A warning would be an error.
  report = ols.diagnostics.count_flops(grad_fn, PARAMS, INPUT)
  assert report.fraction == 1.0
