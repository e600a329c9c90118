"""Compares `autocast` with the same model in float16 by hand, on an H100.

  python benchmarks/autocast/by_hand_bytes.py

The model is the transformer of benchmarks/on_gpu, with fewer layers. Only the
compiler for the H100 is needed: `make bench-autocast` makes the environment.
"""

import argparse
from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import sys
from typing import Any
from unittest import mock

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "compilers"))
import compiled_bytes  # Before JAX starts a device.
import jax
import jax.numpy as jnp
from on_gpu import models
from on_gpu.sizes import Size, SIZES
from shared.tables import markdown

import optax_lossscale as ols

COLUMNS = ["gradient", "MB moved", "", "temporary MB", "", "kernels"]


def main() -> None:
  """Print a table of the variants."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--layers", type=int, default=2)
  size = dataclasses.replace(SIZES["full"], depth=parser.parse_args().layers)
  args = make_arguments(size)
  rows = []
  for name, (dtype, recompute_gelu) in VARIANTS.items():
    loss_fn = make_loss(size, dtype, recompute_gelu)
    rows.append(
      (name, compiled_bytes.figures(jax.grad(loss_fn), *args, device="h100"))
    )
  by_hand = rows[0][1]
  cells = [COLUMNS]
  for name, found in rows:
    cells.append([name])
    for field in ("bytes", "temporary"):
      value = getattr(found, field)
      cells[-1].append(f"{value / 1e6:,.0f}")
      cells[-1].append(f"{value / getattr(by_hand, field):.2f}x")
    cells[-1].append(f"{found.kernels:,}")
  print(markdown(cells, right_from=1))


# Name: (the dtype of the model, whether to recompute gelu). `autocast` is
# around a model in float32.
VARIANTS = {
  "by hand": (jnp.float16, False),
  "`autocast`": (jnp.float32, False),
  "`autocast`, `jax.checkpoint(jax.nn.gelu)`": (jnp.float32, True),
}


def make_loss(
  size: Size, dtype: Any, recompute_gelu: bool
) -> Callable[[Any, Any], jax.Array]:
  """The scaled loss of a variant."""
  loss_fn = models.transformer_loss(size.heads, dtype)
  if dtype == jnp.float32:
    loss_fn = ols.autocast(loss_fn, jnp.float16)
  gelu = jax.checkpoint(jax.nn.gelu) if recompute_gelu else jax.nn.gelu

  def scaled_loss(params, batch):
    with contextlib.ExitStack() as stack:
      stack.enter_context(mock.patch.object(jax.nn, "gelu", gelu))
      stack.enter_context(jax.default_matmul_precision("tensorfloat32"))
      return 2.0**15 * loss_fn(params, batch)

  return scaled_loss


def make_arguments(size: Size) -> tuple[Any, Any]:
  """The shapes of the parameters and of a batch."""
  weight = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  width = size.width
  layer = {
    "qkv": weight(width, 3 * width),
    "out": weight(width, width),
    "up": weight(width, 4 * width),
    "down": weight(4 * width, width),
    "norms": weight(2, width),
  }
  params = {
    "embedding": weight(size.vocabulary, width),
    "positions": weight(size.length, width),
    "layers": [layer] * size.depth,
    "norm": weight(width),
  }
  tokens = jax.ShapeDtypeStruct((size.sequences, size.length), jnp.int32)
  return params, {"inputs": tokens, "labels": tokens}


if __name__ == "__main__":
  main()
