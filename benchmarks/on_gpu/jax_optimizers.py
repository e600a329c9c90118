"""Measures optimizer steps in JAX, without the computation of gradients."""

import dataclasses
import functools
import gc
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
from shared import clock
from shared.jax_program import JaxProgram
from shared.variants import VARIANTS
from shared.workloads import Workload

from on_gpu.findings import Findings, share_time

COMPILED = pathlib.Path(__file__).parents[1] / "compilers/compile_costs.json"
COPY_SECONDS = 5.0  # at most
COMPARED = (
  "bare",
  "ours",
  "ours, plain select",
  "Flax DynamicScale",
  "jmp",
  "apply_if_finite",
)


@dataclasses.dataclass(frozen=True)
class Case:
  """An optimizer and its gradients."""

  same_as: str  # its name in compile_costs.json
  dtype: Any = jnp.float32  # of the gradients
  # For Workload.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  compared: tuple[str, ...] = COMPARED  # variants


CASES = {
  "Adam": Case("adam"),
  "Adam, float16 gradients": Case("adam, float16 gradients", jnp.float16),
  "AdamW, clipped": Case(
    "adamw, clipped", options={"weight_decay": True, "clip": True}
  ),
  "Adam, bfloat16 moments": Case(
    "adam, bfloat16 moments", options={"mu_dtype": jnp.bfloat16}
  ),
}


def run(size, until: float, findings: Findings) -> None:
  """Measure the cases, and report a table of each."""
  copy = measure_copy(make_copy(size), findings)
  for name, case, end in share_time(CASES, until, [1] * len(CASES)):
    _run_case(f"{name}, JAX", case, size, end, findings, copy)
    gc.collect()  # Free the state of this case for the state of the next.


def make_copy(size) -> JaxProgram:
  """Make a program that reads numbers and writes them back."""
  row = {"bytes": 8 * size.copied}
  step = lambda x, _: (x + 1, None)
  return JaxProgram(row, step, jnp.ones(size.copied, jnp.float32), [None])


def measure_copy(copy: clock.Program, findings: Findings) -> float:
  """Return the bytes per second, read and written, and report them in a line.

  The copy adds one to each of many numbers, and its row has the "bytes" that a
  step reads and writes. The bandwidth is NaN if the copy failed.
  """
  until = time.time() + COPY_SECONDS
  clock.measure([copy], rounds=20, steps=10, until=until)
  row = copy.row
  if "milliseconds" not in row:
    findings.add_line(f"The copy could not be measured: {row.get('error')}")
    return float("nan")
  bandwidth = row["bytes"] / row["milliseconds"][1] * 1e3
  findings.add_line(
    f"Copy bandwidth: {bandwidth / 1e9:,.1f} GB/s, read and written"
  )
  findings.add_facts({"copy bandwidth, bytes/s": bandwidth})
  return bandwidth


def _run_case(title, case, size, until, findings, copy):
  workload = make_workload(case, size)
  n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
  rows = [
    {
      "variant": variant,
      "parameters": n_params,
      "copy": copy,
      "expected_bytes": get_expected_bytes(case.same_as, variant),
    }
    for variant in case.compared
  ]
  steps = size.steps_in_a_row
  findings.measure_table(
    "optimizer",
    title,
    rows,
    functools.partial(_make_program, workload=workload, steps=steps + 1),
    rounds=size.rounds,
    steps=steps,
    until=until,
  )


def get_expected_bytes(step: str, variant: str) -> float | None:
  """Return the bytes per parameter by the compiler for H100, or None."""
  if not COMPILED.exists():
    return None
  steps = json.loads(COMPILED.read_text())["steps"].get("h100", {})
  return steps.get(step, {}).get(variant, {}).get("bytes")


def _make_program(row, workload, steps):
  """Compile a row, and take its first steps."""
  step, carry = VARIANTS[row["variant"]][0](workload)
  bad = None if row["variant"] == "bare" else workload.overflowing_data()
  program = JaxProgram(row, step, carry, [workload.data], bad)
  del carry
  clock.take_first_steps(program, steps)
  return program


def make_workload(case: Case, size) -> Workload:
  """Parameters and gradients, drawn on the device."""

  def draw(key):
    # One program: with one for each leaf, it compiles for long.
    draw_all = jax.jit(jax.random.normal, static_argnums=1)
    drawn = draw_all(key, (4, *size.large))
    return {f"w{i}": 1e-2 * leaf for i, leaf in enumerate(drawn)}

  key = jax.random.key(0)
  grads = jax.tree.map(lambda g: g.astype(case.dtype), draw(key))
  return Workload(draw(jax.random.fold_in(key, 1)), grads, **case.options)
