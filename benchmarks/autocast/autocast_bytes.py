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
import functools
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "compilers"))
import compiled_bytes  # Before JAX starts a device.
from flax import linen as nn
import gpus
import jax
import jax.numpy as jnp
from training_tables import calls

import optax_lossscale as ols

HALF = {"v5e": jnp.bfloat16, **dict.fromkeys(gpus.GPUS, jnp.float16)}
BLOCKS, WIDTH, HEADS, BATCH, TOKENS = 16, 512, 8, 16, 512
COLUMNS = ("gradient", "MB moved", "peak MB", "temporary MB", "kernels")


class Block(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x):
    dtype = self.dtype
    y = nn.LayerNorm(dtype=dtype)(x)
    x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=dtype)(y)
    y = nn.Dense(4 * WIDTH, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
    return x + nn.Dense(WIDTH, dtype=dtype)(nn.gelu(y))


class Stack(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x):
    x = x.astype(self.dtype or x.dtype)
    for _ in range(BLOCKS):
      x = Block(self.dtype)(x)
    return x.astype(jnp.float32)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("device", choices=HALF)
  device = parser.parse_args().device
  x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)
  params = jax.eval_shape(Stack().init, jax.random.key(0), x)
  on_gpu = device in gpus.GPUS
  print_row([*COLUMNS, *on_gpu * ["products"]])
  print_row(["---"] + (len(COLUMNS) - 1) * ["--:"] + on_gpu * ["---"])
  for name, loss_fn in variants(HALF[device]).items():
    f = compiled_bytes.figures(jax.grad(loss_fn), params, x, device=device)
    sizes = [f"{n / 1e6:,.0f}" for n in (f.bytes, f.peak, f.temporary)]
    messages = on_gpu * [calls(f.products)]
    print_row([name, *sizes, f"{f.kernels:,}", *messages])


def print_row(cells):
  print("| " + " | ".join(cells) + " |", flush=True)


def variants(half):
  """Return the loss functions by name."""
  loss = lambda dtype: lambda p, x: jnp.mean(Stack(dtype).apply(p, x) ** 2)
  by_hand, cast = loss(half), ols.autocast(loss(None), half)
  remat = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
  )
  return {
    "float32": loss(None),
    "by hand": by_hand,
    "`autocast`": cast,
    "by hand, `dots_saveable`": remat(by_hand),
    "`autocast`, `dots_saveable`": remat(cast),
  }


if __name__ == "__main__":
  main()
