"""Workloads to time: trees of gradients, and two models in float16."""

from collections.abc import Callable
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shared import models, weights

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
    # the batch, a float, can.
    last = max(i for i, leaf in enumerate(leaves) if leaf.dtype.kind != "i")
    bad = jnp.asarray(leaves[last])
    leaves[last] = bad.at[(0,) * bad.ndim].set(jnp.inf)
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
    "transformer": lambda: _transformer(
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
    {
      "kernel": weights.normal(rng, a**-0.5, (a, b)),
      "bias": np.zeros(b, np.float32),
    }
    for a, b in itertools.pairwise(sizes)
  ]
  batch = {
    "inputs": rng.standard_normal((batch_size, n_inputs), np.float32),
    "labels": rng.integers(0, n_classes, batch_size, np.int32),
  }

  def loss_fn(params, batch):
    to_half = lambda x: x.astype(jnp.float16)
    *hidden, last = jax.tree.map(to_half, params)
    x = to_half(batch["inputs"])
    for layer in hidden:
      x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ last["kernel"] + last["bias"]
    return models.cross_entropy(logits, batch["labels"])

  return _weighted(params, batch, loss_fn)


def _transformer(width):
  size = SimpleNamespace(
    width=width, depth=4, heads=4, vocabulary=1024, sequences=8, length=64
  )
  batch, _ = weights.token_batches(size)
  loss_fn = models.transformer_loss(size.heads, jnp.float16)
  return _weighted(weights.transformer(size), batch, loss_fn)


def _weighted(params, batch, loss_fn):
  """Return a workload whose batch has a weight, so that it can overflow."""
  weighted = lambda params, batch: batch["weight"] * loss_fn(params, batch)
  return Workload(params, batch | {"weight": np.ones((), np.float32)}, weighted)
