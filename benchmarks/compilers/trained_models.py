"""Models that people train on GPUs with 16 GB, in Flax linen: whole steps.

Each model is written once. With `dtype=`, it computes in half precision "by
hand", as in Flax: each layer casts, and the activations are in half precision.
Without `dtype=`, it is the float32 model for `autocast`.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

PIXELS, CLASSES = 224, 1000
VARIANTS = ("float32", "by hand", "autocast")


def apply_blocks(x, depth, width, heads, dtype):
  """Apply the blocks of a transformer, in the module that calls this."""
  dense = functools.partial(nn.Dense, dtype=dtype)
  norm = functools.partial(nn.LayerNorm, dtype=dtype)
  for _ in range(depth):
    attention = nn.MultiHeadDotProductAttention(heads, dtype=dtype)
    x += attention(norm()(x))
    x += dense(width)(nn.gelu(dense(4 * width)(norm()(x))))
  return x


class ViT(nn.Module):
  """ViT-B/16 (Dosovitskiy et al, 2021), without dropout."""

  dtype: Any = None
  depth: int = 12
  width: int = 768
  heads: int = 12
  patch: int = 16

  @nn.compact
  def __call__(self, images):
    patches = nn.Conv(
      self.width, 2 * (self.patch,), 2 * (self.patch,), dtype=self.dtype
    )(images)
    x = patches.reshape(len(images), -1, self.width)
    init = nn.initializers.normal(0.02)
    first = self.param("class_token", init, (1, 1, self.width))
    first = jnp.broadcast_to(first.astype(x.dtype), x[:, :1].shape)
    x = jnp.concatenate([first, x], axis=1)
    x += self.param("positions", init, (1, *x.shape[1:])).astype(x.dtype)
    x = apply_blocks(x, self.depth, self.width, self.heads, self.dtype)
    x = nn.LayerNorm(dtype=self.dtype)(x)[:, 0]
    return nn.Dense(CLASSES, dtype=self.dtype)(x)


class ResNet50(nn.Module):
  """ResNet-50 (He et al, 2016), with the stride in the 3 x 3 convolutions."""

  dtype: Any = None
  blocks: tuple[int, ...] = (3, 4, 6, 3)

  @nn.compact
  def __call__(self, images):
    conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
    norm = functools.partial(
      nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
    )
    x = nn.relu(norm()(conv(64, (7, 7), (2, 2))(images)))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for stage, n_blocks in enumerate(self.blocks):
      width = 64 * 2**stage
      for i in range(n_blocks):
        stride = 2 * (2 if stage and not i else 1,)
        y = nn.relu(norm()(conv(width, (1, 1))(x)))
        y = nn.relu(norm()(conv(width, (3, 3), stride)(y)))
        y = norm()(conv(4 * width, (1, 1))(y))
        if not i:
          x = norm()(conv(4 * width, (1, 1), stride)(x))
        x = nn.relu(x + y)
    return nn.Dense(CLASSES, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


class Stack(nn.Module):
  """Blocks of a transformer, on activations of float32."""

  dtype: Any = None
  depth: int = 16
  width: int = 512
  heads: int = 8

  @nn.compact
  def __call__(self, x):
    x = x.astype(self.dtype or x.dtype)
    x = apply_blocks(x, self.depth, self.width, self.heads, self.dtype)
    return x.astype(jnp.float32)


MODELS = {"ViT-B/16": ViT, "ResNet-50": ResNet50}


def make_training_step(
  name: str, variant: str, batch: int
) -> tuple[Callable[..., Any], Any, Any]:
  """A whole step of AdamW, with a loss scale where it computes in float16.

  Returns:
    The step; and the shapes of its carry and of a batch. The step returns the
    new carry and the loss.
  """
  model = MODELS[name](jnp.float16 if variant == "by hand" else None)
  tx = optax.adamw(1e-3)
  if variant != "float32":
    tx = ols.with_loss_scaling(tx)

  def loss_fn(params, stats, images, labels):
    logits, new_stats = model.apply(
      {"params": params, **stats}, images, mutable=["batch_stats"]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), labels
    )
    return jnp.mean(losses), new_stats

  def step(carry, batch):
    (params, stats), opt_state = carry
    if variant == "float32":
      grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    else:
      cast = ols.autocast(loss_fn) if variant == "autocast" else loss_fn
      grad_fn = ols.value_and_grad(cast, opt_state, has_aux=True)
    (loss, changed), grads = grad_fn(params, stats, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    if variant != "float32":
      changed = ols.select_if_finite(opt_state, changed, stats)
    return ((optax.apply_updates(params, updates), changed), opt_state), loss

  images = jax.ShapeDtypeStruct((batch, PIXELS, PIXELS, 3), jnp.float32)
  labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
  stats = dict(jax.eval_shape(model.init, jax.random.key(0), images))
  params = stats.pop("params")
  carry = (params, stats), jax.eval_shape(tx.init, params)
  return step, carry, (images, labels)
