"""Measures optimizer steps in JAX, without the computation of gradients."""

import dataclasses
import functools
import gc
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shared import clock
from shared.jax_program import JaxProgram
from shared.variants import NEEDS, VARIANTS
from shared.workloads import Workload

from on_gpu import bandwidth, events, expected_bytes, jax_device
from on_gpu.rows import Rows

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


NUM_LARGE = 4  # leaves
CLIPPED = {"weight_decay": True, "clip": True}
LARGE = {
  "Adam": Case("adam"),
  "Adam, float16 gradients": Case("adam, float16 gradients", dtype=jnp.float16),
  "AdamW, clipped": Case("adamw, clipped", options=CLIPPED),
  "Adam, bfloat16 moments": Case(
    "adam, bfloat16 moments", options={"mu_dtype": jnp.bfloat16}
  ),
}
# Small leaves move the same bytes, in many more kernels.
SMALL = {
  "Adam, many leaves": Case("adam", many=True),
  "AdamW, clipped, many leaves": Case(
    "adamw, clipped", many=True, options=CLIPPED
  ),
}


CASES = {"large": LARGE, "small": SMALL}
# A variant takes up to so many times as long to compile as the bare optimizer.
VARIANT_TO_BARE = 2.5


def run(what: str, size, until: float, without=(), finished=None) -> None:
  """Measure cases one after the other, and report a table of each.

  Args:
    what: a name in ``CASES``.
    size: the sizes.
    until: the time at which the last case should have ended.
    without: the libraries to leave out.
    finished: the rows that an earlier process measured.
  """
  copy = bandwidth.measure(jax_device.Copy(size.copied), "JAX")
  cases = CASES[what]
  for i, (name, case) in enumerate(cases.items()):
    now = time.time()
    share = (until - now) / (len(cases) - i)
    if share < 1:
      events.line(f"Left out, since no time is left: {name} in JAX")
      continue
    table = Rows("optimizer", f"{name}, JAX", finished)
    _run_case(table, case, size, now + share, without, copy)
    # Free the state of this case for the state of the next.
    jax.clear_caches()
    gc.collect()


def _run_case(table, case, size, until, without, copy):
  variants = [v for v in case.compared if NEEDS.get(v) not in without]
  begin_until = until - 0.3 * (until - time.time())

  def measure_each(variants, leaves):
    workload = make_workload(case, size, leaves)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
    rows = [
      {
        "variant": variant,
        "leaves": leaves if case.many else None,
        "parameters": n_params,
        "copy": copy,
        "expected_bytes": expected_bytes.get_bytes_per_parameter(
          case.same_as, variant
        ),
      }
      for variant in variants
    ]
    make = functools.partial(
      _make_program, workload=workload, steps=size.steps_in_a_row + 1
    )
    return table.measure_each(rows, make, begin_until)

  if case.many:
    # The first row compiles soon, and shows how long the others take.
    programs = measure_each(variants[:1], size.few_small_leaves)
    leaves = _choose_leaves(table.rows[0], size, len(variants), begin_until)
    if leaves == size.few_small_leaves:
      variants = variants[1:]
    programs += measure_each(variants, leaves)
  else:
    programs = measure_each(variants, NUM_LARGE)
  clock.measure(
    programs, rounds=size.rounds, steps=size.steps_in_a_row, until=until
  )
  table.tell(complete=True)


def _choose_leaves(first, size, num_variants, begin_until):
  """Return the number of small leaves, and keep it for a later process."""
  if "chosen_leaves" not in first:
    first["chosen_leaves"] = fit_leaves(
      first.get("compile_seconds", math.inf) / size.few_small_leaves,
      size.few_small_leaves,
      size.small_leaves,
      (begin_until - time.time()) / (num_variants * VARIANT_TO_BARE),
    )
    if first["chosen_leaves"] < size.small_leaves:
      events.line(
        f"{first['chosen_leaves']} leaves instead of {size.small_leaves}, since"
        " these would take longer to compile than the part has"
      )
  return first["chosen_leaves"]


def fit_leaves(
  seconds_per_leaf: float, fewest: int, most: int, available: float
) -> int:
  """Return the number of leaves that compile in the available seconds."""
  if seconds_per_leaf * most <= available:
    return most
  return max(fewest, int(available / seconds_per_leaf))


def _make_program(row, workload, steps):
  """Compile a row, and take its first steps."""
  step, carry = VARIANTS[row["variant"]][0](workload)
  bad = None if row["variant"] == "bare" else overflowing(workload.data)
  program = JaxProgram(row, step, carry, [workload.data], bad)
  del carry
  clock.take_first_steps(program, steps)
  return program


def make_workload(case: Case, size, leaves: int) -> Workload:
  """Parameters and gradients, drawn on the device."""
  shape = size.small if case.many else size.large

  def draw(key):
    # One program: with one for each of 300 leaves, it compiles for a minute.
    drawn = jax.jit(jax.random.normal, static_argnums=1)(key, (leaves, *shape))
    return {f"w{i:03}": 1e-2 * leaf for i, leaf in enumerate(drawn)}

  key = jax.random.key(0)
  grads = jax.tree.map(lambda g: g.astype(case.dtype), draw(key))
  return Workload(draw(jax.random.fold_in(key, 1)), grads, **case.options)


def overflowing(grads: dict[str, Any]) -> dict[str, Any]:
  """The same gradients, of which one entry is inf."""
  name, leaf = list(grads.items())[-1]
  return grads | {name: leaf.at[(0,) * leaf.ndim].set(np.inf)}
