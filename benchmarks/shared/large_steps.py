"""Training steps with many operations, on which the reports take long."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from shared import models, weights

GPT = SimpleNamespace(
  width=32, depth=12, heads=4, vocabulary=64, sequences=2, length=16
)


def make_step(loss_fn, params, batch, loss_scale):
  tx = ols.with_loss_scaling(optax.adam(1e-3), ols.DynamicLossScale(loss_scale))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, params, tx.init(params), batch


def small_layers(count, width=16, loss_scale=2.0**10):
  """Layers of one shape, each with a matrix and a bias."""

  def loss_fn(params, x):
    for w, bias in params:
      x = x + jnp.tanh(x @ w + bias) / count
    return jnp.mean(x**2)

  keys = jax.random.split(jax.random.key(0), count)
  matrix = lambda key: jax.random.normal(key, (width, width)) / width**0.5
  params = [(matrix(key), jnp.zeros(width)) for key in keys]
  x = jax.random.normal(jax.random.key(1), (8, width))
  return make_step(ols.autocast(loss_fn), params, x, loss_scale)


def gpt(
  size=GPT,
  loss_scale=2.0**10,
  overflowing_layer=None,
  dtype=jnp.float32,
  inaccurate_layer=None,
):
  """The transformer of `models`, whose layers are not in a loop.

  It is cast by `autocast`, or by hand if `dtype` is not float32. The MLP of one
  layer may overflow, and a norm of one layer may be inaccurate.
  """
  loss_fn = models.transformer_loss(
    size.heads, dtype, {inaccurate_layer: inaccurate_norm}
  )
  if dtype == jnp.float32:
    loss_fn = ols.autocast(loss_fn)
  params = jax.tree.map(jnp.asarray, weights.transformer(size))
  if overflowing_layer is not None:
    params["layers"][overflowing_layer]["up"] *= 1e5
  batch = jax.tree.map(jnp.asarray, weights.token_batches(size)[0])
  return make_step(loss_fn, params, batch, loss_scale)


def inaccurate_norm(x, gain):
  """A norm that loses the bits of numbers with a large mean."""
  x = x + jnp.asarray(40.0, x.dtype)
  mean = x.mean(-1, keepdims=True)
  variance = (x * x).mean(-1, keepdims=True) - mean * mean
  y = (x - mean) * jax.lax.rsqrt(variance + 1e-3)
  return (gain * y).astype(x.dtype)
