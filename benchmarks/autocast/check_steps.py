"""Measures `check_step` on large steps, next to compiling the step.

  python benchmarks/autocast/check_steps.py  # in the environment of the tests

It prints the table of `README.md`, a row at a time: the CPU seconds to trace
and compile the step, those of `check_step`, their ratio, and how many programs
`check_step` compiles: those of more than a hundred operations, and all. Nothing
is taken from a cache. Arguments are the names of rows; by default all are
measured.
"""

import functools
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared import large_steps

from optax_lossscale import diagnostics


def main():
  jax.config.update("jax_enable_compilation_cache", False)
  print("| step | to compile it | `check_step` | ratio | programs | problems |")
  print("|---|--:|--:|--:|--:|--:|")
  for name in sys.argv[1:] or STEPS:
    print(f"| {name} | {' | '.join(measure(STEPS[name]))} |", flush=True)


def measure(make):
  step, *args = make()
  args = jax.block_until_ready(args)
  compile_seconds, _, _ = cost(lambda: step.lower(*args).compile())
  check_seconds, modules, check = cost(
    lambda: diagnostics.check_step(step, *args, progress=False)
  )
  num_large = sum(module.count("= stablehlo.") > 100 for module in modules)
  return [
    f"{compile_seconds:.1f}",
    f"{check_seconds:.1f}",
    f"{check_seconds / compile_seconds:.1f}x",
    f"{num_large} of {len(modules)}",
    str(len(check.problems)),
  ]


def cost(call):
  """Return the CPU seconds of a call, the modules it compiles, its result."""
  jax.clear_caches()
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update("jax_dump_ir_to", folder)
    start = time.process_time()
    result = call()
    seconds = time.process_time() - start
    jax.config.update("jax_dump_ir_to", "")
    modules = [path.read_text() for path in pathlib.Path(folder).iterdir()]
  return seconds, modules, result


STEPS = {
  "GPT of 12 layers, sound": large_steps.gpt,
  "the same, overflow in the forward pass": functools.partial(
    large_steps.gpt, overflowing_layer=5
  ),
  "the same, overflow in the backward pass": functools.partial(
    large_steps.gpt, loss_scale=2.0**30
  ),
  "GPT of 12 layers by hand, sound": functools.partial(
    large_steps.gpt, dtype=jnp.float16
  ),
  "the same, an error in one norm": functools.partial(
    large_steps.gpt, dtype=jnp.float16, inaccurate_layer=5
  ),
  "200 layers, 400 arrays": functools.partial(large_steps.small_layers, 200),
  "1,000 layers, 2,000 arrays": functools.partial(
    large_steps.small_layers, 1000
  ),
}


if __name__ == "__main__":
  main()
