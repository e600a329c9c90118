"""Search for the equations from which the nonfinite outputs of a program come.

1. A run of the program tells which checked values (see ``_dataflow``) were not
   finite, and when. A *candidate* is a value in whose region an inf or a NaN
   originated: all that its region reads was finite until then.
2. A second program measures each equation in the regions of the candidates. It
   ends at the first value that a candidate made nonfinite.
3. A *suspect* is an equation with finite operands and a nonfinite result. The
   second program runs with the suspects healed, until its results are finite,
   and then with all of them healed but one. A suspect whose inf or NaN does not
   reach the results, such as a mask of -inf, is not an origin.
4. If it is not clear which of several suspects reaches an output, a third
   program measures the same equations and those of later regions, and ends at
   the outputs. Further rounds use it as long as it measures their regions. A
   large program is not compiled a third time: all suspects that reach the next
   checked value are origins.
"""

import collections
from collections.abc import Iterable, Sequence
import itertools
from typing import Any, NamedTuple

from jax.extend import core

from optax_lossscale.diagnostics import _array_tests, _progress
from optax_lossscale.diagnostics._overflow import (
  _candidates,
  _dataflow,
  _instrumentation,
  _measurement,
  _trial,
)

# A program with several masks and faults, one behind the other, may need a
# program for each.
_MAX_ROUNDS = 8
# To compile a larger program a third time would take too long.
_MAX_WHOLE = 1000
# For each suspect, the program runs once or twice.
_MAX_SUSPECTS = 31

Key = _dataflow.Key


class Origin(NamedTuple):
  """An equation, an argument or a constant that is not finite.

  Attributes:
    key: the position of the equation, or the key of the argument or constant.
    iterations: the iteration of each loop around it.
    stats: what the equation read and returned; None if it was not measured.
    outputs: the indices of the nonfinite outputs that it reaches.
  """

  key: Key
  iterations: _candidates.Iterations
  stats: _measurement.EqnStats | None
  outputs: frozenset[int]


def find_origins(
  program: _instrumentation.InstrumentedProgram,
  inputs: Sequence[Any],
  record: _instrumentation.RunRecord,
  bad_outputs: list[int],
  progress: _progress.ProgressLine,
) -> list[Origin]:
  """Find the origins of nonfinite outputs.

  Args:
    program: the program with its checked values.
    inputs: its inputs.
    record: the record of its run.
    bad_outputs: the indices of the nonfinite outputs.
    progress: shows which program is run.

  Returns:
    The origins, in program order.
  """
  state = _candidates.NonfiniteValues(program, inputs, record, bad_outputs)
  if program.measures_all:
    return _select_measured_origins(state, record.stats)
  return _OriginSearch(state, progress).search()


def _select_measured_origins(
  values: _candidates.NonfiniteValues, stats: dict[Key, _measurement.EqnStats]
) -> list[Origin]:
  """Select the origins in a run that measured each equation."""
  faulty_eqns = {key for key, eqn_stats in stats.items() if eqn_stats.is_fault}
  examined: dict[Key, frozenset[int]] = {}
  while True:
    outputs = values.find_candidates(examined).outputs
    # All but arguments and faulty equations only pass on an inf of the program.
    others = {
      key: x
      for key, x in outputs.items()
      if not _dataflow.is_argument(key) and key[:-1] not in faulty_eqns
    }
    if not others:
      break
    examined |= others
  candidates = {
    key if _dataflow.is_argument(key) else key[:-1]: key for key in outputs
  } or _find_constants(values, stats, examined)
  outputs |= examined
  return [
    Origin(key, values.iterations[x], stats.get(key), outputs[x])
    for key, x in candidates.items()
  ]


def _find_constants(
  values: _candidates.NonfiniteValues,
  stats: dict[Key, _measurement.EqnStats],
  candidates: Iterable[Key],
) -> dict[Key, Key]:
  """Find the nonfinite constants and literals that candidates read.

  Returns:
    The key of each with the candidate that reads it; the candidates themselves
    if they read none.
  """
  dataflow = values.dataflow
  is_literal = lambda key: (
    key in stats
    and stats[key].is_nonfinite.any()
    and _has_nonfinite_literal(dataflow.eqns[key])
  )
  constants = {
    key: candidate
    for candidate in candidates
    for key in [
      *values.list_constants(candidate),
      *filter(is_literal, dataflow.list_region(candidate)),
    ]
  }
  return constants or {key: key for key in candidates}


class _OriginSearch:
  """A search with several programs.

  Args:
    values: the nonfinite values of the first run.
    progress: shows which program is run.
  """

  def __init__(
    self, values: _candidates.NonfiniteValues, progress: _progress.ProgressLine
  ) -> None:
    self._values = values
    self._progress = progress
    self._is_large = len(values.dataflow.eqns) > _MAX_WHOLE
    self._whole_program: _instrumentation.InstrumentedProgram | None = None
    # The outputs that each former candidate may reach.
    self._examined: dict[Key, frozenset[int]] = {}
    # The equations and arguments that may be origins, in the order of
    # discovery, and what is known of each.
    self._suspects: list[Key] = []
    self._stats: dict[Key, _measurement.EqnStats] = {}
    self._iterations: dict[Key, _candidates.Iterations] = {}
    self._outputs: dict[Key, frozenset[int]] = {}

  def search(self) -> list[Origin]:
    """Return the origins, in program order."""
    for _ in range(_MAX_ROUNDS):
      candidates = self._values.find_candidates(self._examined)
      if not candidates.outputs:
        break
      # A whole program that is compiled can measure further regions.
      is_whole = self._whole_program is not None
      is_unexplained = self._examine(candidates, is_whole=is_whole)
      is_clear = is_whole or is_unexplained or self._is_decided()
      if not (is_clear or self._is_large):
        self._outputs.clear()
        is_unexplained = self._examine(candidates, is_whole=True)
      # Another round would look for further origins with a longer program.
      has_origin = any(self._outputs.values())
      if not is_unexplained or has_origin:
        break
    keys = [
      key for key, outputs in self._outputs.items() if outputs
    ] or self._suspects
    if not keys:
      constants = _find_constants(self._values, self._stats, self._examined)
      self._iterations |= {
        key: self._iterations[candidate] for key, candidate in constants.items()
      }
      keys = list(constants)
    all_outputs = frozenset(itertools.chain(*self._examined.values()))
    origins = [
      Origin(
        key,
        self._iterations.get(key, ()),
        self._stats.get(key),
        self._outputs.get(key) or all_outputs,
      )
      for key in keys
    ]
    return sorted(origins, key=lambda x: x.key)

  def _is_decided(self) -> bool:
    """Return whether each suspect has an output that no other may reach."""
    counts = collections.Counter(itertools.chain(*self._outputs.values()))
    reached = filter(None, self._outputs.values())
    return all(any(counts[i] == 1 for i in outputs) for outputs in reached)

  def _examine(
    self, candidates: _candidates.Candidates, *, is_whole: bool
  ) -> bool:
    """Find the equations in which candidates became nonfinite.

    Returns:
      Whether nonfinite values are left that these equations do not explain.
    """
    trial = _trial.Trial(
      self._values,
      candidates,
      self._suspects,
      self._progress,
      is_whole=is_whole,
      program=self._whole_program,
    )
    self._examined |= candidates.outputs
    self._iterations |= {
      key: self._values.iterations[key] for key in candidates.outputs
    }
    result = initial = trial.measure([])
    arguments = filter(_dataflow.is_argument, trial.regions)
    origins = [*arguments, *self._record(initial)]
    new = [key for key in origins if key not in self._suspects]
    is_healed = not self._suspects
    while result.bad_targets and (new or not is_healed):
      self._suspects += new
      result = trial.measure(self._suspects)
      new = [key for key in self._record(result) if key not in self._suspects]
      is_healed = True
    if is_whole:
      self._whole_program = trial.program
      self._values.replace(result.iterations, result.bad_targets)
    explained = initial.bad_targets - result.bad_targets
    for key in self._suspects[:_MAX_SUSPECTS] if explained else ():
      reached = trial.find_reached(key, self._suspects) & explained
      outputs = trial.list_outputs(key, reached)
      self._outputs[key] = self._outputs.get(key, frozenset()) | outputs
    return bool(result.bad_targets)

  def _record(self, result: _trial.TrialResult) -> list[Key]:
    """Store what a run shows, and return the equations that may be origins."""
    for key, (stats, iterations) in result.stats.items():
      if key not in self._suspects:
        self._stats[key] = stats
        num_loops = len(self._values.dataflow.list_loops(key))
        self._iterations[key] = iterations[:num_loops]
    items = [(key, stats) for key, (stats, _) in result.stats.items()]
    return [key for key, stats in items if stats.is_origin] or [
      key for key, stats in items if stats.is_nan_origin
    ]


def _has_nonfinite_literal(eqn: core.JaxprEqn) -> bool:
  literals = [x.val for x in eqn.invars if isinstance(x, core.Literal)]
  return not _array_tests.all_finite(literals)
