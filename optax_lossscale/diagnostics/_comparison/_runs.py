"""Runs a program, each time with other products in half precision."""

from typing import Any

import jax
import numpy as np

from optax_lossscale.diagnostics import _tracing
from optax_lossscale.diagnostics._comparison import (
  _errors,
  _program,
  _progress,
  _rows,
  _statistics,
)


class Runs:
  """The runs of a program, and what comes out of each.

  Attributes:
    exact_notes: what was noted of each row in float32.
    half_notes: the same in half precision.
    half: the errors of the results in half precision.
  """

  def __init__(
    self,
    traced: _tracing.Traced,
    rows: _rows.Rows,
    progress: _progress.Progress,
  ) -> None:
    self._traced = traced
    self._count = len(rows.all)
    self._progress = progress

    def run(inputs: list[Any], in_half: Any, noting: bool) -> Any:
      program = _program.Program(rows, in_half)
      widened = list(map(program.widened, inputs))
      empty = [_statistics.empty() for _ in rows.all if noting]
      return program.run(traced.closed, widened, empty)

    self._run = jax.jit(run, static_argnames="noting")
    self._reference, self.exact_notes = self._call([], noting=True)
    everything = list(range(self._count))
    outs, self.half_notes = self._call(everything, noting=True)
    self.half = self._errors(outs)

  def effect(self, in_half: list[int]) -> float:
    """The error of the results if these rows alone run in half precision."""
    return self._errors(self._call(in_half, noting=False)[0]).error

  def _call(self, in_half: list[int], noting: bool) -> Any:
    flags = np.isin(np.arange(self._count), in_half)
    out = jax.block_until_ready(self._run(self._traced.inputs, flags, noting))
    self._progress.step(self._count + 2)
    return out

  def _errors(self, outs: list[Any]) -> _errors.Errors:
    return _errors.errors_of(self._reference, outs, self._traced.groups)
