"""Small float32 models, in each of which one matmul is bad in float16.

A comment, ``# planted``, marks the line of the bad matmul. Without the fault
the same model is sound.
"""

from collections.abc import Callable
import importlib
import linecache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

WIDTH = 32
BATCH = 32


class Model(NamedTuple):
  """A loss function, and how it is differentiated."""

  loss_fn: Callable[..., Any]  # or a function that is not differentiated
  args: tuple[Any, ...]
  loss_scale: float | None = None  # that fits; if not given, the dynamic one
  argnums: int | tuple[int, ...] | None = None
  value_and_grad_fn: Callable[..., Any] | None = (
    jax.value_and_grad
  )  # None: not at all
  jit: Callable[..., Any] = jax.jit  # the library's own

  def grad(self, cast=lambda fun: fun):
    """Return the gradient of the cast loss function, or that function."""
    if self.value_and_grad_fn is None:
      return cast(self.loss_fn)
    scaler = ols.DynamicLossScale()
    if self.loss_scale is not None:
      scaler = ols.FixedLossScale(self.loss_scale)
    kwargs = {} if self.argnums is None else {"argnums": self.argnums}
    kwargs["using"] = self.value_and_grad_fn
    return ols.grad(cast(self.loss_fn), scaler.init(), **kwargs)

  def is_planted(self, row):
    """Return whether a row of a report is about the planted matmul."""
    file_name, line = row.source_line.split(" ")[0].split(":")
    path = f"{__path__[0]}/{file_name}"
    return linecache.getline(path, int(line)).endswith("# planted\n")


def normal(*shape, seed=0):
  """Return random numbers whose matmuls are as large as the other operand."""
  scale = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
  numbers = np.random.default_rng(seed).normal(size=shape) * scale
  return jnp.asarray(numbers, jnp.float32)


def make_weights(*names):
  return {n: normal(WIDTH, WIDTH, seed=i) for i, n in enumerate(names)}


def make_batch():
  x = normal(BATCH, WIDTH, seed=100) * BATCH**0.5
  return x, normal(BATCH, WIDTH, seed=101)


def normalize(x):
  centered = x - jnp.mean(x, -1, keepdims=True)
  return centered / jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)


# The models of each module, which is imported when one of them is made.
_MODULES = {
  "plain_jax": (
    "scores", "logits", "layer_scale", "pixels", "convolution", "one_matmul",
    "several_overflow",
  ),
  "control_flow": (
    "in_scan_of_checkpoints", "in_cond", "in_while", "in_vmap",
    "custom_vjp_forward", "custom_vjp_backward",
  ),
  "devices": ("in_shard_map", "in_shard_map_of_explicit_axes"),
  "libraries": ("linen_scan", "nnx_offset"),
}  # fmt: skip
NAMES = tuple(name for names in _MODULES.values() for name in names)


def make_model(name: str, fault: bool = True) -> Model:
  """Make a model by its name, with its fault or without."""
  (module,) = (m for m, names in _MODULES.items() if name in names)
  module = importlib.import_module(f"{__name__}.{module}")
  return getattr(module, name)(fault)
