"""Equinox: a module of one example, mapped; state that is passed along."""

import equinox as eqx
import jax
import jax.numpy as jnp

from helpers.float32_models import cross_entropy, Model, noisy_images


class _ConvNet(eqx.Module):
  convs: list[eqx.nn.Conv2d]
  norms: list[eqx.nn.BatchNorm]
  head: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key, 3)
    self.convs = [
      eqx.nn.Conv2d(3, 16, 3, 2, padding=1, key=keys[0]),
      eqx.nn.Conv2d(16, 32, 3, 2, padding=1, key=keys[1]),
    ]
    self.norms = [eqx.nn.BatchNorm(n, "batch", mode="batch") for n in (16, 32)]
    self.head = eqx.nn.Linear(32, 10, key=keys[2])

  def __call__(self, x, state):
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x, state = norm(conv(x), state)
      x = jax.nn.relu(x)
    return self.head(jnp.mean(x, (1, 2))), state


def conv_net():
  model, state = eqx.nn.make_with_state(_ConvNet)(jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)
  images = jnp.moveaxis(noisy_images(16, 16), -1, 1)

  def loss_fn(model, images, labels, state):
    batched = jax.vmap(
      model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    logits, state = batched(images, state)
    return cross_entropy(logits, labels), state

  return Model(
    loss_fn,
    params,
    (images, jnp.arange(16) % 10, state),
    unpack=lambda params, _: eqx.combine(params, static),
    value_and_grad_fn=eqx.filter_value_and_grad,
  )
