"""Times `check_step` on a GPT, next to tracing and compiling its step."""

import dataclasses
import time

import jax
from shared import clock, large_steps

from on_gpu.findings import Findings, Table
from optax_lossscale import diagnostics

COMPILE = "trace and compile the step"
OVERFLOW = "check_step, overflow in the middle block"
VARIANTS = (COMPILE, "check_step, sound step", OVERFLOW)


def run(what, size, until: float, findings: Findings, without=()) -> None:
  """Measure the compilation of the step, and each report."""
  table = Table(findings, "report", "check_step of a GPT, JAX")

  def measure(row):
    jax.clear_caches()
    row |= _measure(row["variant"], size)
    compiling = table.rows[0].get("seconds")
    if row["variant"] != COMPILE and compiling:
      row["to_compiling"] = row["seconds"] / compiling

  rows = [{"variant": name} for name in VARIANTS]
  table.measure_each(rows, measure, lambda row: until)
  table.finish()


def _measure(name, size):
  """Return the results of a row."""
  step, *args = make_step(size, overflows=name == OVERFLOW)
  args = jax.block_until_ready(args)
  time_call = lambda call: clock.time_call(call, time.perf_counter)
  if name == COMPILE:
    trace_seconds, traced = time_call(lambda: step.trace(*args))
    seconds, _ = time_call(lambda: traced.lower().compile())
    return {"seconds": trace_seconds + seconds, "trace_seconds": trace_seconds}
  seconds, check = time_call(
    lambda: diagnostics.check_step(step, *args, progress=False)
  )
  return {"seconds": seconds, "problems": len(check.problems)}


def make_step(size, *, overflows: bool):
  """A step of a GPT of the transformer's size, and its arguments.

  The forward pass may overflow in the middle block.
  """
  layer = size.depth // 2 if overflows else None
  size = dataclasses.replace(size, sequences=large_steps.GPT.sequences)
  return large_steps.gpt(size, overflowing_layer=layer)
