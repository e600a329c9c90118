"""Faults of plain functions."""

import jax
from jax import lax
import jax.numpy as jnp

from helpers.planted_layers import (
  make_batch,
  make_weights,
  Model,
  normal,
  normalize,
  WIDTH,
)

SHIFT = normal(WIDTH, WIDTH, seed=50)


def subtract(w, x, fault):
  """A small difference of two large matmuls."""
  shift = 100 * SHIFT if fault else 0.1 * SHIFT
  return x @ (w + shift) - x @ shift  # planted


def attend(ws, x, fault):
  """Scores of 9e4, by which each row finds itself."""
  size = (9e4 / WIDTH) ** 0.5 if fault else 1.0
  keys = size * normalize(x @ ws["keys"])
  scores = keys @ keys.T  # planted
  return jax.nn.softmax(scores / WIDTH**0.5) @ (x @ ws["values"])


def make_network(layer, *names):
  """A loss function with a layer in its middle, and its arguments."""

  def loss_fn(params, x, y):
    x = jnp.tanh(x @ params["first"])
    x = jnp.tanh(layer(params, x))
    x = jnp.tanh(x @ params["second"])
    return jnp.mean((x @ params["last"] - y) ** 2)

  return loss_fn, (
    make_weights("first", "second", "last", *names),
    *make_batch(),
  )


def scores(fault):
  layer = lambda params, x: x + attend(params, x, fault)
  return Model(*make_network(layer, "keys", "values"))


def logits(fault):
  """Nearly equal classes that a low temperature distinguishes."""
  size = 1e-3 if fault else 1.0

  def loss_fn(params, x, labels):
    x = jnp.tanh(x @ params["first"])
    x = jnp.tanh(x @ params["second"])
    classes = SHIFT[:, :1] + size * params["last"]
    predicted = x @ classes / size  # planted
    chosen = jax.nn.log_softmax(predicted)[jnp.arange(len(labels)), labels]
    return -jnp.mean(chosen)

  x, _ = make_batch()
  params = make_weights("first", "second", "last")
  return Model(loss_fn, (params, x, jnp.arange(len(x)) % WIDTH), loss_scale=1.0)


def layer_scale(fault):
  """The gradients of a branch that counts for little underflow."""
  size = 1e-9 if fault else 1.0

  def loss_fn(branch, params, x, y):
    x = jnp.tanh(x @ params["first"])
    x = x + size * jnp.tanh(x @ branch)  # planted
    x = jnp.tanh(x @ params["second"])
    return jnp.mean((x @ params["last"] - y) ** 2)

  params = make_weights("first", "second", "last")
  args = normal(WIDTH, WIDTH, seed=9), params, *make_batch()
  return Model(loss_fn, args, argnums=(0, 1))


def pixels(fault):
  """Squares of numbers up to 255."""

  def loss_fn(params, x, y):
    x = normalize(x**2 @ params["first"])  # planted
    x = jnp.tanh(x @ params["second"])
    return jnp.mean((x @ params["last"] - y) ** 2)

  x, y = make_batch()
  x = jnp.round(255 * jax.nn.sigmoid(x)) / (1 if fault else 255)
  return Model(loss_fn, (make_weights("first", "second", "last"), x, y))


def convolution(fault):
  """The channels of an image share an offset, which a norm takes away."""
  size = 10 if fault else 0

  def loss_fn(params, x, y):
    x = jnp.tanh(lax.conv(x, params["first"], (1, 1), "SAME"))
    w = params["w"] + size
    x = lax.conv(x, w, (1, 1), "SAME")  # planted
    x = jnp.tanh(normalize(jnp.moveaxis(x, 1, -1)))
    return jnp.mean((jnp.mean(x, (1, 2)) @ params["last"] - y) ** 2)

  params = {
    "first": normal(16, 3, 3, 3, seed=1) / 3,
    "w": normal(16, 16, 3, 3, seed=2) / 6,
    "last": normal(16, 8, seed=3),
  }
  x, y = normal(8, 3, 8, 8, seed=4) * 3, normal(8, 8, seed=5)
  return Model(loss_fn, (params, x, y))


def one_matmul(fault):
  """There is nothing to compare it with."""

  def loss_fn(w, x, y):
    return jnp.mean((subtract(w, x, fault) - y) ** 2)

  return Model(loss_fn, (normal(WIDTH, WIDTH), *make_batch()))


def several_overflow(fault):
  """Three of five layers overflow, each individually."""
  size = 1e6 if fault else 1.0

  def loss_fn(params, x, y):
    x = jnp.tanh(x @ params["first"])
    x = normalize(x @ (size * params["a"]))  # planted
    x = normalize(x @ (size * params["b"]))  # planted
    x = normalize(x @ (size * params["c"]))  # planted
    return jnp.mean((x @ params["last"] - y) ** 2)

  params = make_weights("first", "a", "b", "c", "last")
  return Model(loss_fn, (params, *make_batch()))
