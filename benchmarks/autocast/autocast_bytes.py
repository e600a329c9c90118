"""Costs of `autocast` in a stack of Flax blocks, by compilers of TPU and GPU.

  python benchmarks/autocast/autocast_bytes.py v5e   # bfloat16; jax[tpu]
  python benchmarks/autocast/autocast_bytes.py h100  # float16; jax[cuda12]
  python benchmarks/autocast/autocast_bytes.py t4    # the same, and for v100

`make bench-autocast` makes the environment. It prints a table: the gradient of
the stack in float32, in half precision written by hand, and with `autocast`;
the last two also with `jax.checkpoint`. For a GPU it counts the matmuls, by
NVIDIA library and by dtype.
"""

import argparse
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "compilers"))
import compiled_bytes  # Before JAX starts a device.
from flax import linen as nn
import gpus
import jax
import jax.numpy as jnp
from on_gpu.models import RECOMPUTE
from scheduled_hlo import format_matmuls
from shared.tables import markdown

import optax_lossscale as ols

HALF = {"v5e": jnp.bfloat16, **dict.fromkeys(gpus.GPUS, jnp.float16)}
BLOCKS, WIDTH, HEADS, BATCH, TOKENS = 16, 512, 8, 16, 512
COLUMNS = ["gradient", "MB moved", "peak MB", "temporary MB", "kernels"]


class Stack(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x):
    dtype = self.dtype
    x = x.astype(dtype or x.dtype)
    for _ in range(BLOCKS):
      y = nn.LayerNorm(dtype=dtype)(x)
      x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=dtype)(y)
      y = nn.Dense(4 * WIDTH, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
      x = x + nn.Dense(WIDTH, dtype=dtype)(nn.gelu(y))
    return x.astype(jnp.float32)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("device", choices=HALF)
  device = parser.parse_args().device
  x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)
  params = jax.eval_shape(Stack().init, jax.random.key(0), x)
  rows = [[*COLUMNS, "products"]]
  for name, loss_fn in make_variants(HALF[device]).items():
    f = compiled_bytes.figures(jax.grad(loss_fn), params, x, device=device)
    sizes = [f"{n / 1e6:,.0f}" for n in (f.bytes, f.peak, f.temporary)]
    rows.append([name, *sizes, f"{f.kernels:,}", format_matmuls(f.products)])
  print(markdown(rows))


def make_variants(half):
  """Return the loss functions by name."""
  loss = lambda dtype: lambda p, x: jnp.mean(Stack(dtype).apply(p, x) ** 2)
  by_hand, cast = loss(half), ols.autocast(loss(None), half)
  return {
    "float32": loss(None),
    "by hand": by_hand,
    "`autocast`": cast,
    "by hand, `dots_saveable`": RECOMPUTE(by_hand),
    "`autocast`, `dots_saveable`": RECOMPUTE(cast),
  }


if __name__ == "__main__":
  main()
