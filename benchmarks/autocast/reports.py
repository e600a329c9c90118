"""Measures the time of the reports, next to the time to compile the gradient.

  python benchmarks/autocast/reports.py  # in the environment of the tests

It prints the two tables of `README.md` in CPU seconds: one of models, and one
of training steps that take reports long: loops in loops under `vmap`, and many
small layers. Nothing is taken from a cache.
Arguments are the names of rows.
"""

import functools
import pathlib
import sys
import time

import jax

import optax_lossscale as ols
from optax_lossscale import diagnostics

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
from helpers import float32_models, looping_steps

MODELS = (
  "transformer, Flax linen",
  "ResNet, Flax linen",
  "ViT, Flax NNX",
  "MLP-mixer, Equinox",
)


def _layers(count, **kwargs):
  return functools.partial(looping_steps.small_layers, count, **kwargs)


STEPS = {
  "recurrent PPO under vmap": looping_steps.recurrent_ppo,
  "xLSTM": looping_steps.xlstm,
  "10 layers": _layers(10),
  "30 layers": _layers(30),
  "100 layers": _layers(100),
  "100 layers in a scan": _layers(100, is_scan=True),
}


def main():
  jax.config.update("jax_enable_compilation_cache", False)
  names = sys.argv[1:] or [*MODELS, *STEPS]
  print("| gradient | compile | precision | overflow | compare | places |")
  print("|---|--:|--:|--:|--:|--:|")
  for name in filter(MODELS.__contains__, names):
    row = measure(float32_models.make_model(name))
    print(f"| {name} | {' | '.join(row)} |", flush=True)
  print("\n| step | compile | precision | overflow | compare, worst |")
  print("|---|--:|--:|--:|--:|")
  for name in filter(STEPS.__contains__, names):
    row = measure_step(STEPS[name])
    print(f"| {name} | {' | '.join(row)} |", flush=True)


def measure(model):
  fun = lambda arrays: model.value_and_grad(arrays, ols.autocast)
  large = lambda arrays: model.value_and_grad(arrays, ols.autocast, 2.0**60)
  arrays = model.arrays
  num_matmuls = []

  def compare():
    report = diagnostics.compare_precision(fun, arrays, progress=False)
    num_matmuls.append(len(report.layers))

  return [
    *costs((fun, arrays), (large, arrays), compare),
    str(num_matmuls[0]),
  ]


def measure_step(make):
  small = make(loss_scale=1.0)
  compare = functools.partial(
    diagnostics.compare_precision, *small, progress=False
  )
  return costs(small, make(), compare)


def costs(small, large, compare):
  """Return the seconds of each report as cells.

  Args:
    small: a function and its arguments, with a finite result.
    large: a function and its arguments, with a result that overflows.
    compare: compares the precision of `small`.
  """
  fun, *args = small
  finite, overflowing = (
    seconds(functools.partial(diagnostics.find_overflow, *both))
    for both in (small, large)
  )
  return [
    f"{seconds(lambda: jax.jit(fun).lower(*args).compile()):.1f}",
    f"{seconds(lambda: diagnostics.precision_report(fun, *args)):.1f}",
    f"{finite:.1f}, {overflowing:.1f}",
    f"{seconds(compare):.1f}",
  ]


def seconds(call):
  jax.clear_caches()
  start = time.process_time()
  call()
  return time.process_time() - start


if __name__ == "__main__":
  main()
