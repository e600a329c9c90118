"""Compares `autocast` with the same model in float16 by hand, on an H100.

  python benchmarks/autocast/by_hand_bytes.py

The model is the transformer of benchmarks/on_gpu, with fewer layers. Only the
compiler for the H100 is needed: `make bench-autocast` makes the environment.
"""

import argparse
import dataclasses
import pathlib
import sys
from unittest import mock

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "compilers"))
import compiled_bytes  # Before JAX starts a device.
import jax
import jax.numpy as jnp
from on_gpu import models, weights
from on_gpu.sizes import SIZES
from shared.tables import markdown

import optax_lossscale as ols

COLUMNS = ["gradient", "MB moved", "", "temporary MB", "", "kernels"]
# Name: (the dtype of the model, whether to recompute gelu). `autocast` is
# around a model in float32.
VARIANTS = {
  "by hand": (jnp.float16, False),
  "`autocast`": (jnp.float32, False),
  "`autocast`, `jax.checkpoint(jax.nn.gelu)`": (jnp.float32, True),
}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--device", default="h100")
  args = parser.parse_args()
  size = dataclasses.replace(SIZES["full"], depth=args.layers)
  params = weights.transformer(size)
  batch = weights.token_batches(size)[0]
  rows, by_hand = [COLUMNS], None
  for name, variant in VARIANTS.items():
    grad_fn = jax.grad(make_loss(size, *variant))
    found = compiled_bytes.figures(grad_fn, params, batch, device=args.device)
    by_hand = by_hand or found
    row = [name]
    for field in ("bytes", "temporary"):
      value = getattr(found, field)
      row += [f"{value / 1e6:,.0f}", f"{value / getattr(by_hand, field):.2f}x"]
    rows.append([*row, f"{found.kernels:,}"])
  print(markdown(rows, right_from=1))


def make_loss(size, dtype, recompute_gelu):
  """Return the scaled loss of a variant."""
  loss_fn = models.transformer_loss(size.heads, dtype)
  if dtype == jnp.float32:
    loss_fn = ols.autocast(loss_fn, jnp.float16)
  gelu = jax.checkpoint(jax.nn.gelu) if recompute_gelu else jax.nn.gelu

  def scaled_loss(params, batch):
    with (
      mock.patch.object(jax.nn, "gelu", gelu),
      jax.default_matmul_precision("tensorfloat32"),
    ):
      return 2.0**15 * loss_fn(params, batch)

  return scaled_loss


if __name__ == "__main__":
  main()
