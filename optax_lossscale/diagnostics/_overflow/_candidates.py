"""Values in whose regions an inf or a NaN originated (see ``_dataflow``)."""

from collections.abc import Collection, Iterable, Sequence
import itertools
from typing import Any, NamedTuple

from optax_lossscale.diagnostics import _array_tests
from optax_lossscale.diagnostics._overflow import (
  _dataflow,
  _instrumentation,
)

Key = _dataflow.Key
# For a nonfinite value, the iteration of each loop around it.
Iterations = tuple[int, ...]


class NonfiniteValues:
  """The nonfinite values of a run.

  Attributes:
    program: the program.
    dataflow: its checked values.
    inputs: its inputs.
    iterations: for each nonfinite checked value, output and NaN argument, the
      iterations in which it first was nonfinite.
    bad_outputs: the keys of the nonfinite outputs.
  """

  def __init__(
    self,
    program: _instrumentation.InstrumentedProgram,
    inputs: Sequence[Any],
    record: _instrumentation.RunRecord,
    bad_outputs: list[int],
  ) -> None:
    self.program, self.dataflow = program, program.dataflow
    self.inputs = inputs
    bad_args: list[Key] = [
      (_dataflow.ARGUMENT, i) for i in _array_tests.list_nonfinite(inputs)
    ]
    has_nan = lambda key: _array_tests.has_nan(inputs[key[1]])
    self._nan_args = list(filter(has_nan, bad_args))
    # An argument with inf, but no NaN, may be a mask.
    self._inf_args = set(bad_args).difference(self._nan_args)
    self.replace(
      record.first_nonfinite, map(_dataflow.get_output_key, bad_outputs)
    )

  def replace(
    self, iterations: dict[Key, Iterations], bad_outputs: Iterable[Key]
  ) -> None:
    """Replace the nonfinite values by those of another run."""
    self.bad_outputs = sorted(bad_outputs)
    others: dict[Key, Iterations] = dict.fromkeys(
      [*self._nan_args, *self.bad_outputs], ()
    )
    self.iterations = others | iterations

  def get_time(self, key: Key) -> Key:
    """Return when a value first was nonfinite; times are ordered."""
    loops = self.dataflow.list_loops(key)
    iterations = dict(zip(loops, self.iterations.get(key, ()), strict=False))
    time: list[int] = []
    for i in range(0, len(key) - 2, 2):
      time += [key[i], iterations.get(key[: i + 1], 0), key[i + 1]]
    return *time, *key[-2:]

  def list_constants(self, key: Key) -> list[Key]:
    """Return the nonfinite constants, and arguments with inf, that it reads."""
    sources = self.dataflow.list_sources(key)
    is_constant = lambda x: _dataflow.is_constant(x) or x in self._inf_args
    return list(filter(is_constant, sources))

  def find_candidates(self, examined: Collection[Key]) -> "Candidates":
    """Find the values in whose regions an inf or a NaN originated.

    Args:
      examined: the keys of former candidates, which count as finite.

    Returns:
      The candidates that may reach a nonfinite output.
    """
    times = {key: self.get_time(key) for key in self.iterations}
    consumers: dict[Key, list[Key]] = {key: [] for key in times}
    candidates = []
    for key in sorted(times, key=lambda key: times[key]):
      sources = [x for x in self.dataflow.list_sources(key) if x in times]
      for source in sources:
        consumers[source].append(key)
      is_first = all(
        times[source] >= times[key] or source in examined for source in sources
      )
      if is_first and key not in examined:
        candidates.append(key)
    outputs = {key: self._find_outputs(key, consumers) for key in candidates}
    outputs = {key: reached for key, reached in outputs.items() if reached}

    first_consumers = self._find_consumers(list(outputs), times, consumers)
    # A value that reads a former candidate is a candidate now.
    return Candidates(outputs, {} if examined else first_consumers)

  def _find_consumers(
    self,
    candidates: list[Key],
    times: dict[Key, Key],
    consumers: dict[Key, list[Key]],
  ) -> dict[Key, Key]:
    """Return the first nonfinite consumer of each candidate that is near."""
    later = {
      key: [x for x in consumers[key] if times[x] > times[key]]
      for key in candidates
    }
    # Consumers are in the order of their times.
    first = {key: x[0] for key, x in later.items() if x}
    # A program that ends at a distant consumer is as large as the whole one.
    nearest = min((times[x] for x in first.values()), default=())
    horizon = max([nearest, *(times[key] for key in candidates)])
    return {key: x for key, x in first.items() if times[x] <= horizon}

  def _find_outputs(
    self, key: Key, consumers: dict[Key, list[Key]]
  ) -> frozenset[int]:
    """Return the nonfinite outputs that a value may reach."""
    reached = {key}
    stack = [key]
    while stack:
      new = set(consumers[stack.pop()]) - reached
      reached |= new
      stack += new
    return frozenset(
      _dataflow.get_output_index(key) for key in reached & {*self.bad_outputs}
    )


class Candidates(NamedTuple):
  """Values in whose regions an inf or a NaN originated, in program order.

  Attributes:
    outputs: for each candidate, the indices of the nonfinite outputs that it
      may reach.
    consumers: for some candidates, the first nonfinite value that reads it.
  """

  outputs: dict[Key, frozenset[int]]
  consumers: dict[Key, Key]

  def find_outputs(self, key: Key) -> frozenset[int]:
    """Return the outputs that a candidate, or what reads it, may reach."""
    outputs = [
      x for c, x in self.outputs.items() if key in (c, self.get_target(c))
    ]
    return frozenset(itertools.chain(*outputs))

  def get_target(self, key: Key) -> Key:
    """Return the value that shows whether the inf of a candidate matters.

    The candidate may be a mask, so it is what reads the candidate if possible.
    """
    return self.consumers.get(key, key)
