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
from shared.variants import NEEDS, VARIANTS
from shared.workloads import Workload

from on_gpu import devices
from on_gpu.findings import Findings, share_time, Table

COMPILED = pathlib.Path(__file__).parents[1] / "compilers/compile_costs.json"
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
  """An optimizer, its gradients and its leaves."""

  same_as: str  # its name in compile_costs.json
  many: bool = False  # many small leaves, not few large ones
  dtype: Any = jnp.float32  # of the gradients
  # For Workload.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  compared: tuple[str, ...] = COMPARED  # variants


CLIPPED = {"weight_decay": True, "clip": True}
CASES = {
  "large": {
    "Adam": Case("adam"),
    "Adam, float16 gradients": Case(
      "adam, float16 gradients", dtype=jnp.float16
    ),
    "AdamW, clipped": Case("adamw, clipped", options=CLIPPED),
    "Adam, bfloat16 moments": Case(
      "adam, bfloat16 moments", options={"mu_dtype": jnp.bfloat16}
    ),
  },
  # Small leaves move the same bytes, in many more kernels.
  "small": {
    "Adam, many leaves": Case("adam, 100 leaves", many=True),
    "AdamW, clipped, many leaves": Case(
      "adamw, clipped", many=True, options=CLIPPED
    ),
  },
}


def run(what: str, size, until: float, findings: Findings, without=()) -> None:
  """Measure the cases of a name in ``CASES``, and report a table of each."""
  copy = devices.measure_copy(make_copy(size), "JAX", findings)
  cases = CASES[what]
  for name, case, case_until in share_time(cases, until):
    table = Table(findings, "optimizer", f"{name}, JAX")
    _run_case(table, case, size, case_until, without, copy)
    # Free the state of this case for the state of the next.
    jax.clear_caches()
    gc.collect()


def make_copy(size) -> JaxProgram:
  """Make a program that reads numbers and writes them back."""
  row = {"bytes": 8 * size.copied}
  step = lambda x, _: (x + 1, None)
  return JaxProgram(row, step, jnp.ones(size.copied, jnp.float32), [None])


def _run_case(table, case, size, until, without, copy):
  workload = make_workload(case, size)
  leaves = jax.tree.leaves(workload.params)
  rows = [
    {
      "variant": variant,
      "leaves": len(leaves) if case.many else None,
      "parameters": sum(leaf.size for leaf in leaves),
      "copy": copy,
      "expected_bytes": get_expected_bytes(case.same_as, variant),
    }
    for variant in case.compared
    if NEEDS.get(variant) not in without
  ]
  steps = size.steps_in_a_row
  make_program = functools.partial(
    _make_program, workload=workload, steps=steps + 1
  )
  begin_until = until - 0.3 * (until - time.time())
  programs = table.measure_each(rows, make_program, lambda row: begin_until)
  table.take_turns(programs, size, steps, until)


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
  n_leaves = size.small_leaves if case.many else 4
  shape = size.small if case.many else size.large

  def draw(key):
    # One program: with one for each leaf, it compiles for long.
    draw_all = jax.jit(jax.random.normal, static_argnums=1)
    drawn = draw_all(key, (n_leaves, *shape))
    return {f"w{i:03}": 1e-2 * leaf for i, leaf in enumerate(drawn)}

  key = jax.random.key(0)
  grads = jax.tree.map(lambda g: g.astype(case.dtype), draw(key))
  return Workload(draw(jax.random.fold_in(key, 1)), grads, **case.options)
