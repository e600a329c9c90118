"""Times `check_step` on a GPT, next to tracing and compiling its step."""

import time

import jax
from shared import large_steps

from on_gpu.rows import Rows
from optax_lossscale import diagnostics

TITLE = "check_step of a GPT, JAX"
COMPILE = "trace and compile the step"
SOUND = "check_step, sound step"
OVERFLOW = "check_step, overflow in the middle block"


def run(what, size, until: float, without=(), finished=None) -> None:
  """Measure the compilation of the step, and each report."""
  table = Rows("report", TITLE, finished)

  def measure(row):
    jax.clear_caches()
    row |= _measure(row["variant"], size)
    compiling = table.rows[0].get("seconds")
    if row["variant"] != COMPILE and compiling:
      row["to_compiling"] = row["seconds"] / compiling

  rows = [{"variant": name} for name in (COMPILE, SOUND, OVERFLOW)]
  table.measure_each(rows, measure, begin_until=until)
  table.tell(complete=True)


def _measure(name, size):
  """Return the results of a row."""
  step, *args = make_step(size, overflows=name == OVERFLOW)
  args = jax.block_until_ready(args)
  start = time.perf_counter()
  if name == COMPILE:
    traced = step.trace(*args)
    trace_seconds = time.perf_counter() - start
    traced.lower().compile()
    results = {"trace_seconds": trace_seconds}
  else:
    check = diagnostics.check_step(step, *args, progress=False)
    results = {"problems": len(check.problems)}
  return {"seconds": time.perf_counter() - start} | results


def make_step(size, *, overflows: bool):
  """A step of a GPT without loops, and its arguments.

  Args:
    size: the sizes, of which those of the transformer count. The batch has the
      two sequences of `large_steps.gpt`.
    overflows: whether the forward pass overflows in the middle block.
  """
  return large_steps.gpt(
    layers=size.depth,
    width=size.width,
    heads=size.heads,
    length=size.length,
    vocab=size.vocabulary,
    overflowing_layer=size.depth // 2 if overflows else None,
  )
