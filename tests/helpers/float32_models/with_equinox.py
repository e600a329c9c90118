"""Equinox: modules of one example, mapped; state that is passed along."""

import equinox as eqx
import jax
import jax.numpy as jnp

from helpers.float32_models import cross_entropy, Model, noisy_images


class _MixerBlock(eqx.Module):
  mix_patches: eqx.nn.MLP
  mix_channels: eqx.nn.MLP
  norms: list[eqx.nn.LayerNorm]

  def __init__(self, channels, patches, key):
    keys = jax.random.split(key)
    mlp = lambda n, key: eqx.nn.MLP(n, n, 2 * n, 1, jax.nn.gelu, key=key)
    self.mix_patches = mlp(patches, keys[0])
    self.mix_channels = mlp(channels, keys[1])
    self.norms = [eqx.nn.LayerNorm((channels, patches)) for _ in range(2)]

  def __call__(self, x):
    x = x + jax.vmap(self.mix_patches)(self.norms[0](x))
    y = jax.vmap(self.mix_channels, 1, 1)(self.norms[1](x))
    return x + y


class _Mixer(eqx.Module):
  patches: eqx.nn.Conv2d
  blocks: list[_MixerBlock]
  head: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key, 4)
    self.patches = eqx.nn.Conv2d(3, 32, 4, 4, key=keys[0])
    self.blocks = [_MixerBlock(32, 16, key) for key in keys[1:3]]
    self.head = eqx.nn.Linear(32, 10, key=keys[3])

  def __call__(self, image):
    x = self.patches(image).reshape(32, 16)
    for block in self.blocks:
      x = block(x)
    return self.head(jnp.mean(x, -1))


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


def mixer():
  def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return cross_entropy(logits, labels), logits

  return _make_model(loss_fn, _Mixer(jax.random.key(0)), ())


def conv_net():
  model, state = eqx.nn.make_with_state(_ConvNet)(jax.random.key(0))

  def loss_fn(model, images, labels, state):
    batched = jax.vmap(
      model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    logits, state = batched(images, state)
    return cross_entropy(logits, labels), state

  return _make_model(loss_fn, model, (state,))


def _make_model(loss_fn, model, other_args):
  params, static = eqx.partition(model, eqx.is_inexact_array)
  images = jnp.moveaxis(noisy_images(16, 16), -1, 1)
  return Model(
    loss_fn,
    params,
    (images, jnp.arange(16) % 10, *other_args),
    unpack=lambda params, _: eqx.combine(params, static),
    value_and_grad_fn=eqx.filter_value_and_grad,
  )
