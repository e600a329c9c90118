"""Training steps that are slow to compile, each with an overflow in it."""

import jax
from jax import lax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

F16 = jnp.float16


def normalized_layers(depth=4, width=16):
  """Layers with many operations, all of which overflow after the second."""
  keys = jax.random.split(jax.random.key(0), depth)
  params = [jax.random.normal(key, (width, width)) / 4 for key in keys]
  x = jax.random.normal(jax.random.key(1), (8, width))

  def loss_fn(params, x):
    x = x.astype(F16)
    for i, w in enumerate(params):
      new = jax.nn.softmax(x) @ w.astype(F16)
      mean = new.mean(1, keepdims=True)
      new = (new - mean) * lax.rsqrt(new.var(1, keepdims=True) + F16(1e-3))
      if i == 1:
        new = new * 40000
      x = x + jax.nn.silu(new)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return jax.value_and_grad(loss_fn), params, x


def layers_of_all_shapes(depth=12):
  """Dense layers of which no two have the same shape; the third overflows."""
  widths = range(20, 21 + depth)
  keys = jax.random.split(jax.random.key(0), depth)
  params = [
    jax.random.normal(key, (n, n + 1)) / n**0.5
    for key, n in zip(keys, widths, strict=False)
  ]
  x = jax.random.normal(jax.random.key(1), (8, widths[0]))

  def loss_fn(params, x):
    x = x.astype(F16)
    for i, w in enumerate(params):
      x = jax.nn.gelu(x @ w.astype(F16))
      if i == 2:
        x = jnp.square(x * 400)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return jax.value_and_grad(loss_fn), params, x


def recurrent_training(
  members=2, width=16, updates=2, epochs=2, loss_scale=2.0**40
):
  """A recurrent network under ``vmap``: scans in scans in scans.

  The loss scale is too large, so that the backward pass overflows.
  """
  inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
  tx = ols.with_loss_scaling(inner, loss_scale)

  @ols.autocast
  def loss_fn(params, x):
    def cell(hidden, x):
      x = jnp.split(x @ params["input"], 3, axis=-1)
      h = jnp.split(hidden @ params["hidden"], 3, axis=-1)
      forget, update = (jax.nn.sigmoid(x[i] + h[i]) for i in range(2))
      hidden += (1 - update) * (jnp.tanh(x[2] + forget * h[2]) - hidden)
      return hidden, hidden

    _, outputs = lax.scan(cell, jnp.zeros(x.shape[1:]), x)
    return jnp.mean((outputs - 1) ** 2)

  def minibatch(trained, x):
    params, opt_state = trained
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  def update(trained, key):
    x = jax.random.normal(key, (2, 8, 4, width))
    epoch = lambda trained, _: lax.scan(minibatch, trained, x)
    return lax.scan(epoch, trained, None, epochs)

  def train(params, opt_state, key):
    keys = jax.random.split(key, updates)
    return lax.scan(update, (params, opt_state), keys)

  keys = jax.random.split(jax.random.key(0), members)
  params = {
    name: jax.random.normal(keys[0], (members, width, 3 * width)) / width**0.5
    for name in ("input", "hidden")
  }
  return jax.jit(jax.vmap(train)), params, jax.vmap(tx.init)(params), keys
