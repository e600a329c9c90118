"""Measures the time of the reports, next to the time to compile the step.

  python benchmarks/autocast/reports.py  # in the environment of the tests

It prints the table of `README.md`, a row at a time: the CPU seconds to compile
a step, those of `find_overflow` and `check_step` relative to it, and how many
programs `check_step` compiles: those of more than a hundred operations, and
all. Nothing is taken from a cache. Arguments are the names of rows.
"""

from functools import partial
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp

from optax_lossscale import diagnostics

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared.clock import time_call
from shared.large_steps import gpt, small_layers

STEPS = {
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
COLUMNS = (
  "step",
  "to compile it",
  "`find_overflow`",
  "`check_step`",
  "programs",
  "problems",
)


def main():
  jax.config.update("jax_enable_compilation_cache", False)
  print(f"| {' | '.join(COLUMNS)} |\n|---{'|--:' * (len(COLUMNS) - 1)}|")
  for name in sys.argv[1:] or STEPS:
    print(f"| {name} | {' | '.join(measure(*STEPS[name]()))} |", flush=True)


def measure(step, *args):
  """Return the cells of a step after its name."""
  args = jax.block_until_ready(args)
  compiling, _ = time_cold(lambda: step.lower(*args).compile())
  finding, _ = time_cold(lambda: diagnostics.find_overflow(step, *args))
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update("jax_dump_ir_to", folder)
    checking, check = time_cold(
      lambda: diagnostics.check_step(step, *args, progress=False)
    )
    jax.config.update("jax_dump_ir_to", "")
    modules = [path.read_text() for path in pathlib.Path(folder).iterdir()]
  num_large = sum(module.count("= stablehlo.") > 100 for module in modules)
  return [
    f"{compiling:.1f}",
    f"{finding / compiling:.1f}x",
    f"{checking / compiling:.1f}x",
    f"{num_large} of {len(modules)}",
    str(len(check.problems)),
  ]


def time_cold(call):
  jax.clear_caches()
  return time_call(call)


if __name__ == "__main__":
  main()
