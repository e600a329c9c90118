"""A transformer and a residual network in plain JAX, in one dtype throughout.

With float32, these are the models for `autocast`. With float16 or bfloat16,
they are half-precision models by hand: activations in this dtype, and norms,
softmax and loss in float32. `weights` makes their parameters.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

# Saves the results of matmuls, and recomputes everything else.
RECOMPUTE = functools.partial(
  jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
)


def transformer_loss(
  heads: int, dtype: Any, norms: Mapping[int, Callable[..., Any]] | None = None
) -> Callable[[Any, Any], jax.Array]:
  """Return the loss of a transformer without loops.

  Args:
    heads: of the attention.
    dtype: of the activations.
    norms: by the index of a layer, a norm of its MLP that differs.
  """

  def loss_fn(params, batch):
    tokens = batch["inputs"]
    x = (params["embedding"][tokens] + params["positions"]).astype(dtype)
    for i, layer in enumerate(params["layers"]):
      x = _block(x, layer, heads, (norms or {}).get(i, _rms_norm))
    x = _rms_norm(x, params["norm"])
    logits = x @ params["embedding"].astype(x.dtype).T
    return cross_entropy(logits, batch["labels"])

  return loss_fn


def resnet_loss(strides: list[int], dtype: Any) -> Callable[..., jax.Array]:
  """Return the loss of a residual network that normalizes over the batch."""

  def loss_fn(params, batch):
    x = batch["inputs"].astype(dtype)
    x = jax.nn.relu(_conv(x, params["stem"], 2))
    window = (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    x = lax.reduce_window(x, -jnp.inf, lax.max, *window)
    for block, stride in zip(params["blocks"], strides, strict=True):
      x = _bottleneck(x, block, stride)
    x = jnp.mean(x.astype(jnp.float32), axis=(1, 2)).astype(dtype)
    return cross_entropy(x @ params["head"].astype(dtype), batch["labels"])

  return loss_fn


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Return the mean over all predictions, in float32."""
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), labels
  )
  return jnp.mean(losses)


def _block(x, layer, heads, norm):
  weights = {k: w.astype(x.dtype) for k, w in layer.items() if k != "norms"}
  x += _attention(_rms_norm(x, layer["norms"][0]), weights, heads)
  hidden = jax.nn.gelu(norm(x, layer["norms"][1]) @ weights["up"])
  return x + hidden @ weights["down"]


def _attention(x, weights, heads):
  batch, length, width = x.shape
  qkv = (x @ weights["qkv"]).reshape(batch, length, 3, heads, -1)
  q, k, v = (qkv[:, :, i] for i in range(3))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
  scores *= (width // heads) ** -0.5
  seen = jnp.tri(length, dtype=bool)
  share = jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(x.dtype)
  y = jnp.einsum("bhqk,bkhd->bqhd", share, v)
  return y.reshape(batch, length, width) @ weights["out"]


def _rms_norm(x, gain):
  wide = x.astype(jnp.float32)
  wide *= lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
  return (wide * gain).astype(x.dtype)


def _bottleneck(x, block, stride):
  y = jax.nn.relu(_conv(x, block["reduce"]))
  y = jax.nn.relu(_conv(y, block["middle"], stride))
  y = _conv(y, block["expand"])
  if "shortcut" in block:
    x = _conv(x, block["shortcut"], stride)
  return jax.nn.relu(x + y)


def _conv(x, weights, stride=1):
  kernel = weights["kernel"].astype(x.dtype)
  layout = ("NHWC", "HWIO", "NHWC")
  y = lax.conv_general_dilated(
    x, kernel, (stride, stride), "SAME", dimension_numbers=layout
  )
  wide = y.astype(jnp.float32)
  mean = jnp.mean(wide, axis=(0, 1, 2))
  variance = jnp.mean(wide**2, axis=(0, 1, 2)) - mean**2
  factor = weights["gain"] * lax.rsqrt(jnp.maximum(variance, 0) + 1e-5)
  return ((wide - mean) * factor + weights["bias"]).astype(x.dtype)
