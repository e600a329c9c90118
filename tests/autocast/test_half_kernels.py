"""Kernels that take half precision alone, in a float32 model: the recipe.

The kernel is one of Pallas, which is interpreted here. That of cuDNN is
compiled for an H100 by `tests/devices/test_compilers.py`.
"""

import math
import warnings

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

HALF = jnp.float16
LENGTH, WIDTH = 16, 8


def refuse_float32(*arrays):
  for x in arrays:
    if x.dtype != HALF:
      raise TypeError(f"the kernel takes float16, got {x.dtype}")


def multiply(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def shares(q, k):
  return jax.nn.softmax(multiply(q, k.T) * WIDTH**-0.5)


def forward_kernel(q, k, v, out):
  p = shares(q[:], k[:]).astype(HALF)
  out[:] = multiply(p, v[:]).astype(HALF)


def backward_kernel(q, k, v, g, dq, dk, dv):
  p = shares(q[:], k[:])
  dp = multiply(g[:], v[:].T)
  ds = p * (dp - jnp.sum(dp * p, axis=-1, keepdims=True)) * WIDTH**-0.5
  ds = ds.astype(HALF)
  dq[:] = multiply(ds, k[:]).astype(HALF)
  dk[:] = multiply(ds.T, q[:]).astype(HALF)
  dv[:] = multiply(p.astype(HALF).T, g[:]).astype(HALF)


def call(kernel, outputs, *args):
  refuse_float32(*args)
  shape = jax.ShapeDtypeStruct((LENGTH, WIDTH), HALF)
  out_shape = shape if outputs == 1 else outputs * [shape]
  return pl.pallas_call(kernel, out_shape=out_shape, interpret=True)(*args)


@jax.custom_vjp
def half_attention(q, k, v):
  return call(forward_kernel, 1, q, k, v)


half_attention.defvjp(
  lambda *qkv: (half_attention(*qkv), qkv),
  lambda qkv, g: tuple(call(backward_kernel, 3, *qkv, g)),
)


def recipe(q, k, v):
  q_half, k_half, v_half = (x.astype(jnp.float16) for x in (q, k, v))
  return half_attention(q_half, k_half, v_half).astype(q.dtype)


def in_float32(q, k, v):
  return jax.nn.softmax(q @ k.T * WIDTH**-0.5) @ v


def loss_with(attention):
  def loss_fn(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.mean((attention(q, k, v) @ params["out"]) ** 2)

  return loss_fn


KEYS = jax.random.split(jax.random.key(0), 5)
NAMES = "q", "k", "v", "out"
PARAMS = {
  name: jax.random.normal(key, (WIDTH, WIDTH)) / 2
  for name, key in zip(NAMES, KEYS[1:], strict=True)
}
X = jax.random.normal(KEYS[0], (LENGTH, WIDTH))


@pytest.mark.parametrize("change", [lambda f: f, ols.autocast])
def test_such_a_kernel_refuses_float32_also_inside_of_autocast(change):
  with pytest.raises(TypeError, match="takes float16, got float32"):
    change(loss_with(half_attention))(PARAMS, X)


def test_with_casts_around_it_the_gradient_is_that_of_float32():
  state = ols.with_loss_scaling(optax.sgd(1.0)).init(PARAMS)
  grad_fn = ols.value_and_grad(ols.autocast(loss_with(recipe)), state)
  loss, grads = jax.jit(grad_fn)(PARAMS, X)
  expected = jax.value_and_grad(loss_with(in_float32))(PARAMS, X)
  assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
  np.testing.assert_allclose(loss, expected[0], rtol=3e-3)
  for name in NAMES:
    scale = jnp.max(jnp.abs(expected[1][name]))
    np.testing.assert_allclose(
      grads[name] / scale, expected[1][name] / scale, atol=5e-3, err_msg=name
    )


def test_the_loss_scale_reaches_the_backward_pass_of_the_kernel():
  """Gradients of 1e-7 would be lost in float16 without it."""
  tiny = lambda params, x: 1e-7 * loss_with(recipe)(params, x)
  state = ols.with_loss_scaling(optax.sgd(1.0)).init(PARAMS)
  grads = ols.grad(ols.autocast(tiny), state)(PARAMS, X)
  expected = jax.grad(loss_with(in_float32))(PARAMS, X)
  unscaled = jax.grad(ols.autocast(tiny))(PARAMS, X)
  for name in ("q", "k"):
    along = jnp.vdot(grads[name], expected[name])
    norms = map(jnp.linalg.norm, (grads[name], expected[name]))
    assert along > 0.999 * math.prod(norms)
    assert not jnp.any(unscaled[name])


def test_around_it_all_products_are_half_and_nothing_is_told():
  state = ols.with_loss_scaling(optax.sgd(1.0)).init(PARAMS)
  grad_fn = ols.grad(ols.autocast(loss_with(recipe)), state)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    report = diagnostics.precision_report(grad_fn, PARAMS, X)
  assert report.share == 1.0
