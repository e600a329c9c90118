"""Steps with models of several layers, and with the gradient of a gradient.

Losses of one matmul are in ``helpers.usual_losses``.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.sound_steps import (
  CLASSES,
  cross_entropy,
  dense,
  FEATURES,
  HIDDEN,
  integers,
  make_batch,
  make_train_step,
  mse,
  no_cast,
  normal,
  ROWS,
)
import optax_lossscale as ols


def mixture_of_experts():
  """The router stays in float32, and balances the load of the experts."""

  @ols.keep_float32
  def route(weights, x):
    return jax.nn.softmax(x @ weights)

  def loss_fn(params, batch):
    x, y = batch
    probs = route(params["router"], x)
    gates, chosen = lax.top_k(probs, 2)
    hidden = jax.nn.gelu(jnp.einsum("bi,eij->bej", x, params["up"]))
    outputs = jnp.einsum("bej,ejk->bek", hidden, params["down"])
    picked = jnp.take_along_axis(outputs, chosen[..., None], 1)
    load = jnp.mean(jax.nn.one_hot(chosen[:, 0], 4), 0)
    balance = 4 * jnp.sum(load * jnp.mean(probs, 0))
    return mse(jnp.sum(gates[..., None] * picked, 1), y) + 0.01 * balance

  params = {
    "router": dense(FEATURES, 4),
    "up": normal(4, FEATURES, FEATURES, seed=1, scale=0.4),
    "down": normal(4, FEATURES, CLASSES, seed=2, scale=0.4),
  }
  return make_train_step(loss_fn, params, make_batch())


def rarely_used_rows():
  """Most rows of the table have no gradient in one batch."""

  def loss_fn(params, batch):
    tokens, labels = batch
    x = jnp.mean(params["embed"][tokens], 1)
    return cross_entropy(x @ params["head"], labels)

  params = {"embed": normal(500, FEATURES), "head": dense(FEATURES, CLASSES)}
  batch = integers(500, 8, 3), integers(CLASSES, 8, seed=1)
  return make_train_step(loss_fn, params, batch)


def elementwise_ops():
  """A model without a matmul, in float16 by hand."""

  def loss_fn(params, x):
    half_params, x = optax.tree.cast((params, x), jnp.float16)
    out = jnp.tanh(x * half_params["scale"] + half_params["shift"])
    return jnp.mean((out.astype(jnp.float32) - 1) ** 2)

  params = {"scale": np.ones(4, np.float32), "shift": np.zeros(4, np.float32)}
  return make_train_step(loss_fn, params, normal(8, 4), cast=no_cast)


def gradient_penalty():
  """The critic of a WGAN, whose loss contains a gradient."""

  def critic(params, x):
    hidden = jax.nn.softplus(x @ params["hidden"])
    return jnp.sum(hidden @ params["out"])

  def loss_fn(params, batch):
    real, fake = batch
    slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, real)
    norms = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
    distance = critic(params, fake) - critic(params, real)
    return distance / len(real) + jnp.mean((norms - 1) ** 2)

  params = {"hidden": dense(FEATURES, HIDDEN), "out": dense(HIDDEN, 1, seed=1)}
  batch = normal(ROWS, FEATURES, seed=1), 0.5 + normal(ROWS, FEATURES, seed=2)
  return make_train_step(loss_fn, params, batch)
