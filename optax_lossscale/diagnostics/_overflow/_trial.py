"""A program that shows which equations make values nonfinite."""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale.diagnostics import _array_tests, _progress
from optax_lossscale.diagnostics._overflow import (
  _candidates,
  _dataflow,
  _instrumentation,
  _measurement,
)

# Compilation takes longer the more equations are measured.
_MAX_MEASURED = 256
# The numbers that replace an inf or a NaN. A zero may be a divisor, and a one
# the operand of a difference.
_HEAL_VALUES = 0.0, 1.0

Key = _dataflow.Key
Iterations = _candidates.Iterations


class TrialResult(NamedTuple):
  """The result of the runs of a trial.

  Attributes:
    bad_targets: the targets that were not finite.
    iterations: for each nonfinite checked value, the iterations in which it
      first was.
    stats: for each equation of the regions, its statistics when the candidate
      became nonfinite, and the iterations in which the candidate did.
  """

  bad_targets: frozenset[Key]
  iterations: dict[Key, Iterations]
  stats: dict[Key, tuple[_measurement.EqnStats, Iterations]]


class Trial:
  """A program that measures the regions of some candidates.

  It ends at the targets of the candidates, or is the whole program, whose
  targets are the nonfinite outputs.

  Args:
    values: the nonfinite values of a run.
    candidates: the candidates.
    suspects: the equations and arguments that may be origins.
    progress: shows how many equations the program measures.
    is_whole: whether it is the whole program.
    program: a compiled whole program. It is used again if it measures all
      regions.

  Attributes:
    regions: the positions of the equations in the region of each candidate.
    is_whole: whether it is the whole program.
    program: the compiled program.
  """

  def __init__(
    self,
    values: _candidates.NonfiniteValues,
    candidates: _candidates.Candidates,
    suspects: list[Key],
    progress: _progress.ProgressLine,
    *,
    is_whole: bool,
    program: _instrumentation.InstrumentedProgram | None,
  ) -> None:
    self.regions: dict[Key, list[Key]] = {}
    measured = {x for x in suspects if not _dataflow.is_argument(x)}
    # Without the inf of a candidate, the value that reads it may overflow by
    # itself.
    targets = map(candidates.get_target, candidates.outputs)
    for key in dict.fromkeys([*candidates.outputs, *targets]):
      region = values.dataflow.list_region(key)
      if self.regions and len(measured.union(region)) > _MAX_MEASURED:
        break
      self.regions[key] = region
      measured.update(region)
    self._candidates = candidates
    self._values = values
    self._iterations = dict(values.iterations)
    self.is_whole = is_whole
    if is_whole:
      self._targets = set(values.bad_outputs)
      checked = [*values.iterations]
    else:
      self._targets = {candidates.get_target(key) for key in self.regions}
      checked = [*self.regions, *self._targets]
    if program is None or not measured.issubset(program.measured):
      if is_whole:
        measured |= self._list_later_eqns(_MAX_MEASURED - len(measured))
      program = _make_program(values, checked, measured)
    self.program = program
    count = len(program.measured)
    progress.set_description(f"measuring {count} operation{'s' * (count > 1)}")

  def _list_later_eqns(self, max_size: int) -> set[Key]:
    """Return equations that a later trial of the whole program may measure."""
    eqns: set[Key] = set()
    for key in sorted(self._values.iterations, key=self._values.get_time):
      region = self._values.dataflow.list_region(key)
      if len(eqns.union(region)) > max_size:
        break
      eqns.update(region)
    return eqns

  def measure(self, healed: list[Key]) -> TrialResult:
    """Measure the regions, with some equations and arguments healed."""
    results = []
    for value in _HEAL_VALUES:
      results.append((value, *self._run(healed, value)))
      if not results[-1][-1] or not healed:
        break
    value, record, bad_targets = min(results, key=lambda x: len(x[-1]))
    self._iterations |= record.first_nonfinite
    # Measure each region in the iteration in which its candidate became
    # nonfinite.
    record_by_iteration: dict[Any, _instrumentation.RunRecord] = {
      frozenset(): record
    }
    stats: dict[Key, tuple[_measurement.EqnStats, Iterations]] = {}
    for key, region in self.regions.items():
      iterations = self._iterations.get(key, ())
      limits = dict(
        zip(self._values.dataflow.list_loops(key), iterations, strict=True)
      )
      group = frozenset(limits.items())
      if group not in record_by_iteration:
        record_by_iteration[group], _ = self._run(healed, value, limits)
      for eqn_key in region:
        eqn_stats = record_by_iteration[group].stats[eqn_key]
        stats.setdefault(eqn_key, (eqn_stats, iterations))
    return TrialResult(bad_targets, record.first_nonfinite, stats)

  def find_reached(self, suspect: Key, suspects: list[Key]) -> frozenset[Key]:
    """Return the targets that a suspect makes nonfinite on its own."""
    suspects_by_target: dict[Key, set[Key]] = collections.defaultdict(set)
    for key in self.regions:
      target = self._candidates.get_target(key)
      suspects_by_target[target] |= {
        x for x in suspects if self._is_own(key, x)
      }
    # The only suspect in the regions that lead to a target needs no test.
    reached = frozenset(
      target for target, own in suspects_by_target.items() if own == {suspect}
    )
    if reached and not self.is_whole:
      return reached
    healed = [key for key in suspects if key != suspect]
    reached = frozenset(self._targets)
    for value in _HEAL_VALUES:
      _, bad_targets = self._run(healed, value)
      reached &= bad_targets
      if not reached:
        break
    return reached

  def list_outputs(
    self, suspect: Key, targets: frozenset[Key]
  ) -> frozenset[int]:
    """Return the outputs that a suspect reaches, given the targets it does."""
    if self.is_whole:
      return frozenset(map(_dataflow.get_output_index, targets))
    outputs = {
      key: self._candidates.find_outputs(key)
      for key in self.regions
      if self._candidates.get_target(key) in targets
    }
    own_outputs = [
      x for key, x in outputs.items() if self._is_own(key, suspect)
    ]
    return frozenset(itertools.chain(*(own_outputs or outputs.values())))

  def _is_own(self, key: Key, suspect: Key) -> bool:
    """Return whether a suspect is a candidate, or in its region."""
    return suspect == key or suspect in self.regions[key]

  def _run(
    self,
    healed: list[Key],
    value: float,
    limits: dict[Key, int] | None = None,
  ) -> tuple[_instrumentation.RunRecord, frozenset[Key]]:
    """Run the program, and return its record and the nonfinite targets."""
    inputs = list(self._values.inputs)
    for key in filter(_dataflow.is_argument, healed):
      inputs[key[1]] = _replace_nonfinite(inputs[key[1]], value)
    record = self.program.run(inputs, healed, value, limits)
    bad_outputs = {
      _dataflow.get_output_key(self.program.output_indices[i])
      for i in _array_tests.list_nonfinite(record.outs)
    }
    bad_keys = bad_outputs.union(record.first_nonfinite)
    return record, frozenset(self._targets & bad_keys)


def _make_program(
  values: _candidates.NonfiniteValues, checked: list[Key], measured: set[Key]
) -> _instrumentation.InstrumentedProgram:
  """Return a program that checks some values and measures some equations."""
  output_keys = set(filter(_dataflow.is_output, checked))
  return _instrumentation.InstrumentedProgram(
    values.program.closed_jaxpr,
    values.dataflow,
    values.program.compiler_options,
    checked={key for key in checked if _dataflow.is_checked_value(key)},
    measured=measured,
    output_indices=sorted(map(_dataflow.get_output_index, output_keys)),
  )


@jax.jit
def _replace_nonfinite(x: Any, value: Any) -> Any:
  """Replace the nonfinite entries of a float array by a number."""
  return jnp.where(jnp.isfinite(x), x, jnp.asarray(value, x.dtype))
