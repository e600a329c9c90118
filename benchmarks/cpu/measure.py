"""Compiles the variants of a workload, takes their figures and their times."""

import random
import statistics
import time
from typing import Any

import jax
import numpy as np
from shared.variants import VARIANTS
import tqdm


class Program:
  """One variant of one workload, compiled, with its own state.

  Attributes:
    figures: the figures that don't depend on the clock, by name.
  """

  def __init__(self, name, workload):
    make, self.baseline = VARIANTS[name]
    self.name = name
    step, carry = make(workload)
    self.data = jax.device_put(workload.data)
    self.overflowing_data = jax.device_put(workload.overflowing_data())
    self.carry = jax.tree.map(_own_buffer, carry)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
    self._compiled, self.figures = _compile(step, self.carry, self.data)
    for key in ("bytes", "flops", "temporary_bytes", "aliased_bytes"):
      self.figures[key] /= n_params

  def run(self, *, overflow: bool = False) -> tuple[float, float]:
    """Takes a step; returns its seconds by the clock and of CPU time."""
    data = self.overflowing_data if overflow else self.data
    start = time.perf_counter(), time.process_time()
    self.carry, loss = self._compiled(self.carry, data)
    jax.block_until_ready((self.carry, loss))
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(
  workload: Any, names: list[str], rounds: int, bar: tqdm.tqdm
) -> dict[str, dict[str, Any]]:
  """All figures of the named variants of one workload.

  Args:
    workload: the workload.
    names: names of variants; the ones they are measured against are among them.
    rounds: how often each takes a step and a step that it has to skip.
    bar: is advanced once for each variant compiled and each round.

  Returns:
    By variant, by figure: the number, or [first quartile, median, third
    quartile] of a ratio taken within each round.
  """
  programs = {}
  for name in names:
    bar.set_postfix_str(f"compiles {name}")
    programs[name] = Program(name, workload)
    bar.update()
  runs = [(name, skip) for name in names for skip in (False, True)]
  # Baselines can't skip a step: they would continue with NaN.
  runs = [r for r in runs if not r[1] or programs[r[0]].baseline != r[0]]
  seconds = {run: [] for run in runs}
  for i in range(rounds + 1):
    bar.set_postfix_str(f"round {i} of {rounds}")
    for name, skip in random.sample(runs, len(runs)):
      elapsed = programs[name].run(overflow=skip)
      if i > 0:  # The first round touches all memory for the first time.
        seconds[name, skip].append(elapsed)
    bar.update()
  return {
    name: _summarize(program, programs[program.baseline], seconds)
    for name, program in programs.items()
  }


def count_traces(name: str, workload: Any, n_steps: int = 10) -> int:
  """How often JAX traces the step in a loop of some applied, some skipped."""
  step, carry = VARIANTS[name][0](workload)
  traces = 0

  def counted(carry, data):
    nonlocal traces
    traces += 1
    return step(carry, data)

  jitted = jax.jit(counted, donate_argnums=0)
  carry = jax.tree.map(_own_buffer, carry)
  for i in range(n_steps):
    data = workload.overflowing_data() if i == 5 else workload.data
    carry, _ = jitted(carry, data)
  return traces


def _summarize(program, baseline, seconds):
  """The figures and the ratios, each of two times of the same round."""
  own = seconds[program.name, False]
  base = seconds[baseline.name, False]
  figures = dict(program.figures)
  figures["bytes_ratio"] = figures["bytes"] / baseline.figures["bytes"]
  figures["trace_and_compile_ratio"] = sum(_seconds(program)) / sum(
    _seconds(baseline)
  )
  figures["milliseconds"] = 1e3 * statistics.median(wall for wall, _ in own)
  figures["time"] = _ratio(own, base, 0)
  figures["cpu_time"] = _ratio(own, base, 1)
  if (program.name, True) in seconds:
    skipped = seconds[program.name, True]
    figures["skipped_time"] = _ratio(skipped, own, 0)
    figures["skipped_cpu_time"] = _ratio(skipped, own, 1)
  return figures


def _seconds(program):
  return program.figures["trace_seconds"], program.figures["compile_seconds"]


def _ratio(times, base, which):
  ratios = [a[which] / b[which] for a, b in zip(times, base, strict=True)]
  return statistics.quantiles(ratios, n=4)


def _compile(step, carry, data):
  # CPU time, since it does not grow when others use the machine.
  start = time.process_time()
  traced = jax.jit(step, donate_argnums=0).trace(carry, data)
  lowered = traced.lower()
  traced_at = time.process_time()
  compiled = lowered.compile()
  compiled_at = time.process_time()
  cost = compiled.cost_analysis()
  memory = compiled.memory_analysis()
  return compiled, {
    "bytes": cost["bytes accessed"],
    "flops": cost["flops"],
    "temporary_bytes": memory.temp_size_in_bytes,
    "aliased_bytes": memory.alias_size_in_bytes,
    "equations": len(traced.jaxpr.eqns),
    "instructions": compiled.as_text().count(" = "),
    "trace_seconds": traced_at - start,
    "compile_seconds": compiled_at - traced_at,
  }


def _own_buffer(leaf):
  """A copy that may be donated, of the same type, weak or not."""
  if isinstance(leaf, np.ndarray):
    return jax.device_put(leaf.copy())
  return leaf.copy() if isinstance(leaf, jax.Array) else leaf
