"""Flax NNX: objects that a loss function changes in place."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from helpers.float32_models import cross_entropy, Model, noisy_images


class _Convolutions(nnx.Module):
  def __init__(self, inputs, outputs, dtype, rngs):
    self.conv = nnx.Conv(inputs, outputs, (3, 3), dtype=dtype, rngs=rngs)
    self.norm = nnx.BatchNorm(outputs, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    return nnx.relu(self.norm(self.conv(x)))


class _UNet(nnx.Module):
  """It halves an image twice, and comes back by transposed convolutions."""

  def __init__(self, dtype, rngs):
    convolutions = functools.partial(_Convolutions, dtype=dtype, rngs=rngs)
    options = {"kernel_size": (2, 2), "strides": (2, 2)}
    up = functools.partial(nnx.ConvTranspose, dtype=dtype, rngs=rngs, **options)
    self.down = nnx.List(
      [convolutions(3, 8), convolutions(8, 16), convolutions(16, 32)]
    )
    self.up = nnx.List([up(32, 16), up(16, 8)])
    self.joined = nnx.List([convolutions(32, 16), convolutions(16, 8)])
    self.last = nnx.Conv(8, 2, (1, 1), dtype=dtype, rngs=rngs)

  def __call__(self, x):
    skipped = []
    for down in self.down:
      x = down(x)
      skipped.append(x)
      x = nnx.avg_pool(x, (2, 2), (2, 2))
    x = skipped.pop()
    for up, joined in zip(self.up, self.joined, strict=True):
      x = joined(jnp.concatenate([up(x), skipped.pop()], -1))
    return self.last(x).astype(jnp.float32)


class _ViT(nnx.Module):
  """Patches, a class token, attention with dropout."""

  def __init__(self, dtype, rngs):
    options = {"dtype": dtype, "rngs": rngs}
    self.patches = nnx.Conv(3, 32, (4, 4), (4, 4), **options)
    self.token = nnx.Param(jnp.zeros((1, 1, 32)))
    self.positions = nnx.Param(0.02 * jax.random.normal(rngs(), (17, 32)))
    self.blocks = nnx.List([_Block(options) for _ in range(2)])
    self.norm = nnx.LayerNorm(32, **options)
    self.head = nnx.Linear(32, 10, **options)

  def __call__(self, x):
    x = self.patches(x).reshape(x.shape[0], -1, 32)
    token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, 32))
    x = jnp.concatenate([token.astype(x.dtype), x], 1)
    x = x + self.positions[...].astype(x.dtype)
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x)[:, 0]).astype(jnp.float32)


class _Block(nnx.Module):
  def __init__(self, options):
    self.norms = nnx.List([nnx.LayerNorm(32, **options) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(
      4, 32, dropout_rate=0.1, deterministic=False, decode=False, **options
    )
    self.up = nnx.Linear(32, 64, **options)
    self.down = nnx.Linear(64, 32, **options)

  def __call__(self, x):
    x = x + self.attention(self.norms[0](x))
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def unet(dtype=None):
  model = nnx.jit(lambda: _UNet(dtype, nnx.Rngs(0)))()
  images = noisy_images(4, 16)
  return _classifier(model, images, (images[..., 0] > 0).astype(jnp.int32))


def vit(dtype=None):
  images = noisy_images(8, 16)
  model = nnx.jit(lambda: _ViT(dtype, nnx.Rngs(0)))()
  return _classifier(model, images, jnp.arange(8))


def _classifier(model, images, labels):
  structure, params, others = nnx.split(model, nnx.Param, ...)

  def loss_fn(model, images, labels):
    loss = cross_entropy(model(images), labels)
    return loss, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

  return Model(
    loss_fn,
    params,
    (images, labels),
    state=others,
    # Of copies: the loss function changes the variables in place.
    unpack=lambda params, others: nnx.merge(
      structure, params, jax.tree.map(lambda x: x, others)
    ),
    using=nnx.value_and_grad,
  )
