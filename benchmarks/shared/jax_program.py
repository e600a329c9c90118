"""A compiled JAX step with its own state."""

from collections.abc import Callable, Sequence
import time
from typing import Any, NamedTuple

from compilers import scheduled_hlo
import jax
import numpy as np

from shared.clock import Program


class CompiledStep(NamedTuple):
  """A compiled step, its trace, and the seconds of each stage."""

  traced: jax.stages.Traced
  compiled: jax.stages.Compiled
  trace_seconds: float
  lower_seconds: float
  compile_seconds: float


def compile_step(
  step: Callable[..., Any],
  *args: Any,
  clock: Callable[[], float] = time.perf_counter,
) -> CompiledStep:
  """Trace and compile a step that donates its first argument.

  CPU time does not grow with other work on the machine, but includes all
  threads of the compiler.
  """
  times = [clock()]
  traced = jax.jit(step, donate_argnums=0).trace(*args)
  times.append(clock())
  lowered = traced.lower()
  times.append(clock())
  compiled = lowered.compile()
  times.append(clock())
  return CompiledStep(traced, compiled, *np.diff(times).tolist())


class JaxProgram(Program):
  """A step ``step(carry, data) -> (carry, loss)``, compiled.

  Its carry, which is donated, is that after the last step. Each step with the
  bad data must be skipped.
  """

  def __init__(
    self,
    row: dict[str, Any],
    step: Callable[..., Any],
    carry: Any,
    data: Sequence[Any],
    bad_data: Any = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self.row = row
    self.skips = bad_data is not None
    self.carry = copy_for_donation(carry)
    self._data, self._bad_data = data, bad_data
    self._taken = 0
    self._loss: Any = None
    self.stages = compile_step(step, self.carry, data[0], clock=clock)
    row["compile_seconds"] = sum(self.stages[2:])
    row |= _read_figures(self.stages.compiled)

  def step(self, skip: bool) -> None:
    data = self._data[self._taken % len(self._data)]
    self._taken += 1
    self.carry, self._loss = self.stages.compiled(
      self.carry, self._bad_data if skip else data
    )

  def wait(self) -> None:
    jax.block_until_ready((self.carry, self._loss))

  def loss(self) -> float:
    """Return the loss of the last step."""
    return float(self._loss)


def copy_for_donation(tree: Any) -> Any:
  """Return a copy of a tree, with leaves of the same types, weak or not."""

  def copy(leaf):
    if isinstance(leaf, np.ndarray):
      return jax.device_put(leaf.copy())
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf

  return jax.tree.map(copy, tree)


def _read_figures(compiled):
  memory = scheduled_hlo.read_memory(compiled)
  names = "peak", "temporary", "aliased"
  figures = {f"{name}_bytes": memory[name] for name in names}
  try:
    moved = scheduled_hlo.parse(compiled.as_text())
  except Exception:  # Another compiler may write HLO that `parse` can't read.
    return figures
  return figures | {"moved_bytes": moved.bytes, "kernels": moved.kernels}
