"""What the reports cost, beside compiling the gradient that they are given.

  python benchmarks/autocast/reports.py  # in the environment of the tests

It prints a table in CPU seconds, for the page *Performance*. Nothing is taken
from a cache.
"""

import pathlib
import sys
import time

import jax

import optax_lossscale as ols
from optax_lossscale import diagnostics

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
from helpers import float32_models

MODELS = (
  "transformer, Flax linen",
  "ResNet, Flax linen",
  "ViT, Flax NNX",
  "MLP-mixer, Equinox",
)


def main():
  names = sys.argv[1:] or MODELS
  print("| gradient | compile | precision | overflow | compare | places |")
  print("|---|--:|--:|--:|--:|--:|")
  for name in names:
    print(f"| {name} | {' | '.join(measure(float32_models.make(name)))} |")


def measure(model):
  fun = lambda arrays: model.value_and_grad(arrays, ols.autocast)
  large = lambda arrays: model.value_and_grad(arrays, ols.autocast, 2.0**60)
  arrays = model.arrays
  compare = lambda: diagnostics.compare_precision(fun, arrays, progress=False)
  return [
    f"{seconds(lambda: jax.jit(fun).lower(arrays).compile()):.1f}",
    f"{seconds(lambda: diagnostics.precision_report(fun, arrays)):.1f}",
    f"{seconds(lambda: diagnostics.find_overflow(fun, arrays)):.1f},"
    f" {seconds(lambda: diagnostics.find_overflow(large, arrays)):.1f}",
    f"{seconds(compare):.1f}",
    str(len(compare().products)),
  ]


def seconds(call):
  jax.clear_caches()
  start = time.process_time()
  call()
  return time.process_time() - start


if __name__ == "__main__":
  main()
