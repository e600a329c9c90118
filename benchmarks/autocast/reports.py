"""Measures the time of the reports, next to the time to compile the step.

  python benchmarks/autocast/reports.py  # in the environment of the tests

It prints the tables of `README.md` in CPU seconds: of the gradients of models
and of steps with loops in loops under `vmap` or many layers; and of
`check_step` on large steps, with the programs of more than a hundred operations
that it compiles, and all. Nothing is taken from a cache. Arguments are the
names of rows.
"""

from functools import partial
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from optax_lossscale import diagnostics

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))
from helpers import float32_models, looping_steps
from shared.clock import time_call
from shared.large_steps import gpt, small_layers

MODELS = (
  "transformer, Flax linen",
  "ResNet, Flax linen",
  "ViT, Flax NNX",
  "MLP-mixer, Equinox",
)
LOOPING = {
  "recurrent PPO under vmap": looping_steps.recurrent_ppo,
  "xLSTM": looping_steps.xlstm,
  "10 layers": partial(looping_steps.small_layers, 10),
  "30 layers": partial(looping_steps.small_layers, 30),
  "100 layers": partial(looping_steps.small_layers, 100),
  "100 layers in a scan": partial(
    looping_steps.small_layers, 100, is_scan=True
  ),
}
LARGE = {
  "GPT of 12 layers, sound": gpt,
  "the same, overflow in the forward pass": partial(gpt, overflowing_layer=5),
  "the same, overflow in the backward pass": partial(gpt, loss_scale=2.0**30),
  "GPT of 12 layers by hand, sound": partial(gpt, dtype=jnp.float16),
  "the same, an error in one norm": partial(
    gpt, dtype=jnp.float16, inaccurate_layer=5
  ),
  "200 layers, 400 arrays": partial(small_layers, 200),
  "1,000 layers, 2,000 arrays": partial(small_layers, 1000),
}


def main():
  jax.config.update("jax_enable_compilation_cache", False)
  names = sys.argv[1:] or [*MODELS, *LOOPING, *LARGE]
  print("| gradient or step | compile | precision | overflow | compare |")
  print("|---|--:|--:|--:|--:|")
  for name in names:
    if name not in LARGE:
      print(f"| {name} | {' | '.join(measure(name))} |", flush=True)
  print(
    "\n| step | to compile it | `check_step` | ratio | programs | problems |"
  )
  print("|---|--:|--:|--:|--:|--:|")
  for name in names:
    if name in LARGE:
      print(f"| {name} | {' | '.join(measure_check(*LARGE[name]()))} |")


def measure(name):
  """Return the cells of a row: the seconds to compile, and of each report."""
  if name in LOOPING:
    small, large = LOOPING[name](loss_scale=1.0), LOOPING[name]()
  else:
    model = float32_models.make_model(name)
    small, large = (
      (make_grad_fn(model, loss_scale), model.arrays)
      for loss_scale in (2.0**6, 2.0**60)
    )
  fun, *args = small
  return [
    f"{cpu_seconds(lambda: jax.jit(fun).lower(*args).compile()):.1f}",
    f"{cpu_seconds(lambda: diagnostics.precision_report(fun, *args)):.1f}",
    f"{cpu_seconds(partial(diagnostics.find_overflow, *small)):.1f}, "
    f"{cpu_seconds(partial(diagnostics.find_overflow, *large)):.1f}",
    f"{cpu_seconds(partial(compare, *small)):.1f}",
  ]


def make_grad_fn(model, loss_scale):
  return lambda arrays: model.value_and_grad(arrays, ols.autocast, loss_scale)


compare = partial(diagnostics.compare_precision, progress=False)


def cpu_seconds(call):
  jax.clear_caches()
  return time_call(call)[0]


def measure_check(step, *args):
  """Return the cells of a row about `check_step`."""
  args = jax.block_until_ready(args)
  compile_seconds = cpu_seconds(lambda: step.lower(*args).compile())
  jax.clear_caches()
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update("jax_dump_ir_to", folder)
    check_seconds, check = time_call(
      lambda: diagnostics.check_step(step, *args, progress=False)
    )
    jax.config.update("jax_dump_ir_to", "")
    modules = [path.read_text() for path in pathlib.Path(folder).iterdir()]
  num_large = sum(module.count("= stablehlo.") > 100 for module in modules)
  return [
    f"{compile_seconds:.1f}",
    f"{check_seconds:.1f}",
    f"{check_seconds / compile_seconds:.1f}x",
    f"{num_large} of {len(modules)}",
    str(len(check.problems)),
  ]


if __name__ == "__main__":
  main()
