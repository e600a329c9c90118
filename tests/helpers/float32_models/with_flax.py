"""Flax linen and NNX.

Batch statistics, dropout, lifted scan and remat, recurrence; objects that a
loss function changes in place.
"""

import functools
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from helpers.float32_models import cross_entropy, Model, noisy_images

KEY = jax.random.key(0)


class _ResidualBlock(nn.Module):
  features: int
  stride: int = 1
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    conv = lambda size, stride: nn.Conv(
      self.features, (size, size), stride, use_bias=False, dtype=self.dtype
    )
    norm = lambda: nn.BatchNorm(use_running_average=False, dtype=self.dtype)
    y = nn.relu(norm()(conv(3, self.stride)(x)))
    y = norm()(conv(3, 1)(y))
    if x.shape != y.shape:
      x = norm()(conv(1, self.stride)(x))
    return nn.relu(x + y)


class _ResNet(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(16, (7, 7), 2, use_bias=False, dtype=self.dtype)(x)
    x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
    x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
    for features, stride in ((16, 1), (32, 2), (64, 2)):
      x = _ResidualBlock(features, stride, self.dtype)(x)
    x = jnp.mean(x, (1, 2), jnp.float32)
    return nn.Dense(10, dtype=self.dtype)(x).astype(jnp.float32)


class _Transformer(nn.Module):
  """A decoder with a mask of -1e9, dropout and a tied output."""

  dtype: Any = None

  @nn.compact
  def __call__(self, tokens, *, train):
    embed = nn.Embed(96, 32, dtype=self.dtype)
    positions = self.param(
      "positions", nn.initializers.normal(0.02), (tokens.shape[1], 32)
    )
    x = embed(tokens) + positions.astype(self.dtype or jnp.float32)
    for _ in range(2):
      y = _CausalAttention(self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
      x = x + nn.Dropout(0.1, deterministic=not train)(y)
      y = nn.Dense(128, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
      y = nn.Dense(32, dtype=self.dtype)(nn.gelu(y))
      x = x + nn.Dropout(0.1, deterministic=not train)(y)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return embed.attend(x).astype(jnp.float32)


class _CausalAttention(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    project = lambda: nn.DenseGeneral((4, 8), dtype=self.dtype)
    q, k, v = project()(x), project()(x), project()(x)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype)(y)


class _Layer(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x, _):
    y = nn.LayerNorm(dtype=self.dtype)(x)
    mask = nn.make_causal_mask(x[..., 0])
    x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
    y = nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
    return x + nn.Dense(32, dtype=self.dtype)(nn.silu(y)), None


class _ScannedStack(nn.Module):
  layers: int
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      nn.remat(_Layer, prevent_cse=False),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=self.layers,
    )
    x, _ = stack(self.dtype)(x.astype(self.dtype or x.dtype), None)
    return nn.Dense(8, dtype=self.dtype)(x).astype(jnp.float32)


class _Gru(nn.Module):
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    forward = nn.RNN(nn.GRUCell(32, dtype=self.dtype))
    backward = nn.RNN(nn.GRUCell(32, dtype=self.dtype))
    x = nn.Bidirectional(forward, backward)(x)
    return nn.Dense(8, dtype=self.dtype)(x).astype(jnp.float32)


def resnet(dtype=None):
  model = _ResNet(dtype)
  images, labels = noisy_images(16, 32), jnp.arange(16) % 10
  variables = jax.jit(model.init)(KEY, images)

  def loss_fn(params, stats, images, labels):
    logits, new = model.apply(
      {"params": params, "batch_stats": stats}, images, mutable=["batch_stats"]
    )
    return cross_entropy(logits, labels), new

  batch = variables["batch_stats"], images, labels
  return Model(loss_fn, variables["params"], batch)


def transformer(dtype=None):
  model = _Transformer(dtype)
  tokens = jax.random.randint(KEY, (4, 33), 0, 96)
  init = functools.partial(model.init, train=False)
  params = jax.jit(init)(KEY, tokens[:, :-1])

  def loss_fn(params, tokens, key):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rngs = {"dropout": key}
    logits = model.apply(params, inputs, train=True, rngs=rngs)
    return cross_entropy(logits, targets), logits

  return Model(loss_fn, params, (tokens, jax.random.key(1)))


def scanned_stack(dtype=None, layers=3):
  return _make_regression(_ScannedStack(layers, dtype), (2, 16, 32))


def gru(dtype=None):
  return _make_regression(_Gru(dtype), (4, 12, 16))


def _make_regression(model, shape):
  x = jax.random.normal(KEY, shape)
  y = jax.random.normal(KEY, (*shape[:-1], 8))

  def loss_fn(params, x, y):
    predicted = model.apply(params, x)
    return jnp.mean((predicted - y) ** 2), predicted

  return Model(loss_fn, jax.jit(model.init)(KEY, x), (x, y))


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


def unet(dtype=None):
  model = nnx.jit(lambda: _UNet(dtype, nnx.Rngs(0)))()
  structure, params, other_state = nnx.split(model, nnx.Param, ...)
  images = noisy_images(4, 16)

  def loss_fn(model, images, labels):
    loss = cross_entropy(model(images), labels)
    return loss, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

  return Model(
    loss_fn,
    params,
    (images, (images[..., 0] > 0).astype(jnp.int32)),
    state=other_state,
    # Merge copies, because the loss function changes the variables in place.
    unpack=lambda params, others: nnx.merge(
      structure, params, jax.tree.map(lambda x: x, others)
    ),
    value_and_grad_fn=nnx.value_and_grad,
  )
