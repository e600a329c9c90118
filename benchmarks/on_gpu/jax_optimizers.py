"""Measures optimizer steps in JAX, without the computation of gradients."""

import dataclasses
import gc
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shared.variants import NEEDS, VARIANTS
from shared.workloads import Workload

from on_gpu import bandwidth, clock, events, expected_bytes, jax_device
from on_gpu.jax_program import JaxProgram
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
  """An optimizer, its gradients and its leaves.

  Attributes:
    same_as: the name of these steps in compile_costs.json.
    many: many small leaves instead of few large ones.
    dtype: that of the gradients.
    options: for ``Workload``.
    compared: the variants.
  """

  same_as: str
  many: bool = False
  dtype: Any = jnp.float32
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  compared: tuple[str, ...] = COMPARED


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


def run(
  cases: dict[str, Case], size, until: float, without, finished=None
) -> None:
  """Measure the cases one after the other, and report a table of each."""
  copy = bandwidth.measure(jax_device.Copy(size.copied), "JAX")
  for i, (name, case) in enumerate(cases.items()):
    now = time.time()
    share = (until - now) / (len(cases) - i)
    if share < 1:
      events.line(f"Left out, since no time is left: {name} in JAX")
      continue
    table = Rows("optimizer", f"{name}, JAX", finished or {})
    _run_case(table, case, size, now + share, without, copy)
    # Free the state of this case for the state of the next.
    jax.clear_caches()
    gc.collect()


def _run_case(table, case, size, until, without, copy):
  workload = make_workload(case, size)
  bad = overflowing(workload.data)
  n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
  programs = []
  compiled_until = until - 0.3 * (until - time.time())
  for variant in case.compared:
    if NEEDS.get(variant) in without:
      continue
    row = {"variant": variant, "parameters": n_params, "copy": copy}
    row["expected_bytes"] = expected_bytes.get_bytes_per_parameter(
      case.same_as, variant
    )
    if not table.begin(row):
      continue
    if time.time() > compiled_until:
      row["error"] = "left out, since no time is left"
      table.tell()
      continue
    with clock.catch(row):
      step, carry = VARIANTS[variant][0](workload)
      program = JaxProgram(
        row, step, carry, [workload.data], None if variant == "bare" else bad
      )
      del carry
      program.count_host_reads()
      clock.first_steps(program, size.steps_in_a_row + 1)
      programs.append(program)
    table.tell()
  clock.measure(
    programs, rounds=size.rounds, steps=size.steps_in_a_row, until=until
  )
  table.tell(complete=True)


def make_workload(case: Case, size) -> Workload:
  """Parameters and gradients, drawn on the device."""
  shapes = [size.small] * size.small_leaves if case.many else [size.large] * 4
  names = [f"w{i:03}" for i in range(len(shapes))]

  @jax.jit
  def draw(key):
    keys = jax.random.split(key, len(shapes))
    return {
      name: 1e-2 * jax.random.normal(key, shape)
      for name, key, shape in zip(names, keys, shapes, strict=True)
    }

  key = jax.random.key(0)
  grads = jax.tree.map(lambda g: g.astype(case.dtype), draw(key))
  return Workload(draw(jax.random.fold_in(key, 1)), grads, **case.options)


def overflowing(grads: dict[str, Any]) -> dict[str, Any]:
  """The same gradients, of which one entry is inf."""
  name, leaf = list(grads.items())[-1]
  return grads | {name: leaf.at[(0,) * leaf.ndim].set(np.inf)}
