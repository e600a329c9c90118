"""Faults of Haiku's layers."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from helpers.planted_layers import batch, Model, WIDTH


def haiku_pixels(fault):
  """A convolution of squares of numbers up to 255."""

  def apply(images):
    x = hk.Conv2D(16, 3)(images**2)  # planted
    x = jax.nn.relu(hk.GroupNorm(4)(x))
    x = jax.nn.relu(hk.Conv2D(16, 3, stride=2)(x))
    return hk.Linear(8)(jnp.mean(x, (1, 2)))

  net = hk.without_apply_rng(hk.transform(apply))
  noise = jax.random.uniform(jax.random.key(0), (16, 8, 8, 3))
  images = noise * (255 if fault else 1)
  params = jax.jit(net.init)(jax.random.key(0), images)

  def loss_fn(params, images, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      net.apply(params, images), labels
    )
    return jnp.mean(losses)

  return Model(loss_fn, (params, images, jnp.arange(16) % 8))


def haiku_offset(fault):
  def apply(x):
    x = jnp.tanh(hk.Linear(WIDTH)(x))
    offset = hk.initializers.RandomNormal(WIDTH**-0.5, 10 if fault else 0)
    x = hk.Linear(WIDTH, w_init=offset)(x)  # planted
    x = hk.LayerNorm(-1, True, True)(x)
    return hk.nets.MLP([WIDTH, WIDTH])(x)

  net = hk.without_apply_rng(hk.transform(apply))
  x, y = batch()
  params = jax.jit(net.init)(jax.random.key(0), x)
  loss_fn = lambda params, x, y: jnp.mean((net.apply(params, x) - y) ** 2)
  return Model(loss_fn, (params, x, y))
