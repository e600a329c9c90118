"""A compiled JAX step with its own state."""

from collections.abc import Callable, Sequence
import time
from typing import Any

from compilers import scheduled_hlo
import jax
import numpy as np


class JaxProgram:
  """A step ``step(carry, data) -> (carry, loss)``, compiled.

  Its carry is donated.

  Attributes:
    row: the facts about the program, by name.
    skips: whether it has data of which each step must be skipped.
    carry: the carry after the last step.
  """

  def __init__(
    self,
    row: dict[str, Any],
    step: Callable[..., Any],
    carry: Any,
    data: Sequence[Any],
    bad_data: Any = None,
  ):
    self.row = row
    self.skips = bad_data is not None
    self.carry = jax.tree.map(_own_buffer, carry)
    self._data, self._bad_data = data, bad_data
    self._taken = 0
    self._loss: Any = None
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(self.carry, data[0])
    self._compiled = lowered.compile()
    row["compile_seconds"] = time.perf_counter() - start
    row |= _figures(self._compiled)

  def prepare(self, skip: bool) -> None:
    pass

  def step(self, skip: bool) -> None:
    data = self._data[self._taken % len(self._data)]
    self._taken += 1
    self.carry, self._loss = self._compiled(
      self.carry, self._bad_data if skip else data
    )

  def wait(self) -> None:
    jax.block_until_ready((self.carry, self._loss))

  def loss(self) -> float:
    """The loss of the last step, read to the host."""
    return float(self._loss)

  def count_host_reads(self) -> None:
    """Takes a step in which JAX refuses to move anything to or from the host.

    A compiled program cannot transfer to the host, so this shows that the
    Python code between two steps does not, either. On a CPU it shows nothing.
    """
    self.step(False)
    self.wait()
    try:
      with jax.transfer_guard("disallow"):
        self.step(False)
    except Exception as error:
      if "transfer" not in str(error):
        raise
      self.row["host_reads"] = "some"
    else:
      self.row["host_reads"] = 0
    self.wait()


def _figures(compiled):
  memory = compiled.memory_analysis()
  peak = getattr(memory, "peak_memory_in_bytes", 0) or (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes
  )
  figures = {
    "peak_bytes": peak,
    "temporary_bytes": memory.temp_size_in_bytes,
    "aliased_bytes": memory.alias_size_in_bytes,
  }
  try:
    moved = scheduled_hlo.parse(compiled.as_text())
  except Exception:  # Another compiler may write HLO that `parse` can't read.
    return figures
  return figures | {"moved_bytes": moved.bytes, "kernels": moved.kernels}


def _own_buffer(leaf):
  """A copy that may be donated, of the same type, weak or not."""
  if isinstance(leaf, np.ndarray):
    return jax.device_put(leaf.copy())
  return leaf.copy() if isinstance(leaf, jax.Array) else leaf
