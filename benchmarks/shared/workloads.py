"""Workloads to time: trees of gradients, and two models in float16."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

LEARNING_RATE = 1e-3
MAX_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Workload:
  """One thing to time."""

  params: Any  # float32, or their shapes
  data: Any  # the argument of a step: the gradients, or a batch for loss_fn
  loss_fn: Callable[..., Any] | None = None  # of params and a batch
  weight_decay: bool = False  # AdamW instead of Adam
  clip: bool = False  # to a global norm of MAX_NORM
  mu_dtype: Any = None  # of the first moment

  def optimizer(self) -> optax.GradientTransformation:
    """The optimizer without any clipping."""
    make = optax.adamw if self.weight_decay else optax.adam
    return make(LEARNING_RATE, mu_dtype=self.mu_dtype)

  def clipping_optimizer(self) -> optax.GradientTransformation:
    """The optimizer as one writes it with Optax alone."""
    if not self.clip:
      return self.optimizer()
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), self.optimizer())

  def overflowing_data(self) -> Any:
    """Data of which every step has to be skipped."""
    leaves, treedef = jax.tree.flatten(self.data)
    # Integer leaves of a batch (labels, tokens) cannot overflow; the weight of
    # each example, a float in every batch, can.
    last = max(i for i, leaf in enumerate(leaves) if leaf.dtype.kind != "i")
    bad = leaves[last].copy()
    bad.flat[0] = np.inf
    leaves[last] = bad
    return jax.tree.unflatten(treedef, leaves)


def make_workloads(scale: float) -> dict[str, Callable[[], Workload]]:
  """All workloads by name; each is built when it is called.

  Args:
    scale: factor of all sizes: 1 suits two CPU cores, and about 16 a GPU.
  """
  side = round(2048 * scale**0.5)
  few = {f"w{i}": (side, side) for i in range(4)}
  small = round(128 * scale**0.5)
  many = lambda n: {f"w{i:03}": (small, small) for i in range(n)}
  return {
    "adam": lambda: _given_gradients(few),
    "adam, float16 gradients": lambda: _given_gradients(few, np.float16),
    "adam, 100 leaves": lambda: _given_gradients(many(100)),
    "adam, 600 leaves": lambda: _given_gradients(many(600)),
    "adamw, clipped": lambda: _given_gradients(
      few, weight_decay=True, clip=True
    ),
    "mlp": lambda: _mlp(width=round(1024 * scale**0.5)),
    "transformer": lambda: _make_transformer(
      width=64 * max(1, round(4 * scale**0.5))
    ),
  }


def _given_gradients(shapes, dtype=np.float32, **options):
  rng = np.random.default_rng(0)
  draw = lambda shape: 1e-2 * rng.standard_normal(shape, np.float32)
  return Workload(
    params={name: draw(shape) for name, shape in shapes.items()},
    data={name: draw(shape).astype(dtype) for name, shape in shapes.items()},
    **options,
  )


def _mlp(width, batch_size=256, depth=3, n_inputs=784, n_classes=10):
  rng = np.random.default_rng(0)
  sizes = [n_inputs, *[width] * depth, n_classes]
  params = [
    {"kernel": _kernel(rng, a, b), "bias": np.zeros(b, np.float32)}
    for a, b in itertools.pairwise(sizes)
  ]
  batch = {
    "inputs": rng.standard_normal((batch_size, n_inputs), np.float32),
    "labels": rng.integers(0, n_classes, batch_size, np.int32),
    "weights": np.ones(batch_size, np.float32),
  }

  def logits_fn(params, inputs):
    x = inputs
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]

  return Workload(params, batch, _loss_fn(logits_fn))


def _make_transformer(
  width, depth=4, heads=4, batch_size=8, length=64, vocab=1024
):
  rng = np.random.default_rng(0)
  layer = lambda: {
    "qkv": _kernel(rng, width, 3 * width),
    "out": _kernel(rng, width, width),
    "up": _kernel(rng, width, 4 * width),
    "down": _kernel(rng, 4 * width, width),
    "norms": np.ones((2, width), np.float32),
  }
  params = {
    "embedding": 0.02 * rng.standard_normal((vocab, width), np.float32),
    "positions": 0.02 * rng.standard_normal((length, width), np.float32),
    "layers": [layer() for _ in range(depth)],
  }
  tokens = rng.integers(0, vocab, (batch_size, length + 1), np.int32)
  batch = {
    "inputs": tokens[:, :-1],
    "labels": tokens[:, 1:],
    "weights": np.ones((batch_size, length), np.float32),
  }

  def logits_fn(params, tokens):
    x = params["embedding"][tokens] + params["positions"]
    for layer in params["layers"]:
      x += _attention(layer, _normalize(x, layer["norms"][0]), heads)
      hidden = _normalize(x, layer["norms"][1]) @ layer["up"]
      x += jax.nn.gelu(hidden) @ layer["down"]
    return x @ params["embedding"].T

  return Workload(params, batch, _loss_fn(logits_fn))


def _attention(layer, x, heads):
  split = lambda y: y.reshape(*y.shape[:2], heads, -1)
  q, k, v = map(split, jnp.split(x @ layer["qkv"], 3, axis=-1))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
  causal = jnp.tri(x.shape[1], dtype=bool)
  scores = jnp.where(causal, scores * q.shape[-1] ** -0.5, -1e9)
  y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
  return y.reshape(x.shape) @ layer["out"]


def _normalize(x, gain):
  wide = x.astype(jnp.float32)
  wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
  return wide.astype(x.dtype) * gain


def _loss_fn(logits_fn):
  """Cross-entropy of a model that computes in float16."""

  def loss_fn(params, batch):
    to_half = lambda x: x.astype(jnp.float16)
    inputs = batch["inputs"]
    if jnp.issubdtype(inputs.dtype, jnp.floating):
      inputs = to_half(inputs)
    logits = logits_fn(jax.tree.map(to_half, params), inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), batch["labels"]
    )
    return jnp.mean(losses * batch["weights"])

  return loss_fn


def _kernel(rng, n_in, n_out):
  return rng.standard_normal((n_in, n_out), np.float32) / np.float32(
    np.sqrt(n_in)
  )
