"""Find the equations from which the nonfinite outputs of a program come.

1. A run of the program shows which checked values (see ``_regions``) were not
   finite, and when. A *candidate* is a value in whose region an inf or a NaN
   originated: all that its region reads was finite until then.
2. A second program measures each equation in the regions of the candidates, and
   of the values that read them, but those that only move data.
3. A *suspect* is an equation with finite operands and a nonfinite result. The
   second program runs with the suspects healed, which may reveal further ones,
   until its outputs are finite. Then it runs once for each suspect, in program
   order, with all others healed. A suspect whose inf or NaN does not reach an
   output, such as a mask of -inf, is not an origin, and isn't healed any more.
   Suspects that were revealed matter only if all others are such masks: without
   the first overflow, a later one may follow.
"""

from collections.abc import Iterable
from typing import NamedTuple

from optax_lossscale._jaxprs import _primitives, _regions
from optax_lossscale.diagnostics import (
  _eqn_stats,
  _host_values,
  _instrumented_program,
  _tracing,
)

# Compilation takes longer the more equations are measured.
_MAX_MEASURED = 48
# These return entries of their operands, so no inf or NaN originates in them.
_MOVEMENT = _primitives.DATA_MOVEMENT | _primitives.BROADCASTING
# The program runs once for each suspect.
_MAX_SUSPECTS = 31
# A fault behind a few masks is found by healing them. In a loop that diverges,
# each iteration overflows if those before it are healed.
_MAX_ROUNDS = 3

Key = _regions.Key
# For a nonfinite value, the iteration of each loop around it.
Iterations = tuple[int, ...]


class Origin(NamedTuple):
  """An equation or an argument that is not finite.

  Attributes:
    key: the position of the equation, or the key of the argument.
    iterations: the iteration of each loop around it.
    stats: what the equation read and returned; None if it was not measured.
    outputs: the indices of the nonfinite outputs that it reaches.
  """

  key: Key
  iterations: Iterations
  stats: _eqn_stats.EqnStats | None
  outputs: frozenset[int]


def find_origins(
  program: _instrumented_program.InstrumentedProgram,
  record: _instrumented_program.RunRecord,
  bad_outputs: list[int],
  progress: _tracing.ProgressLine,
) -> list[Origin]:
  """Find the origins of nonfinite outputs.

  Args:
    program: the program with its checked values.
    record: the record of its run.
    bad_outputs: the indices of the nonfinite outputs.
    progress: shows how many equations the second program measures.

  Returns:
    The origins, in program order.
  """
  values = _NonfiniteValues(program.traced, record, bad_outputs)
  search = _OriginSearch(program.traced, values, bad_outputs)
  count = len(search.program.measured)
  progress.set_description(f"measuring {count} operation{'s' * (count > 1)}")
  return search.find_origins()


class _NonfiniteValues:
  """The nonfinite values of a run.

  Args:
    traced: the program.
    record: the record of its run.
    bad_outputs: the indices of its nonfinite outputs.

  Attributes:
    iterations: for each nonfinite checked value, output and NaN argument, in
      program order, the iterations in which it first was nonfinite.
    inf_args: the arguments with inf, but no NaN. They may be masks.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    record: _instrumented_program.RunRecord,
    bad_outputs: Iterable[int],
  ) -> None:
    self._regions = traced.regions
    bad_args: list[Key] = [
      (_regions.ARGUMENT, i) for i in _host_values.list_nonfinite(traced.inputs)
    ]
    has_nan = lambda key: _host_values.has_nan(traced.inputs[key[1]])
    nan_args = list(filter(has_nan, bad_args))
    self.inf_args = set(bad_args).difference(nan_args)
    iterations: dict[Key, Iterations] = record.first_nonfinite | dict.fromkeys(
      [*nan_args, *map(_regions.get_output_key, bad_outputs)], ()
    )
    self._times = {key: self.get_time(key, x) for key, x in iterations.items()}
    keys = sorted(iterations, key=lambda key: self._times[key])
    self.iterations = {key: iterations[key] for key in keys}

  def get_time(self, key: Key, iterations: Iterations) -> Key:
    """Return when a value first was nonfinite; times are ordered."""
    loops = self._regions.list_loops(key)
    iteration_by_loop = dict(zip(loops, iterations, strict=False))
    time: list[int] = []
    for i in range(0, len(key) - 2, 2):
      time += [key[i], iteration_by_loop.get(key[: i + 1], 0), key[i + 1]]
    return *time, *key[-2:]

  def _list_nonfinite_sources(self, key: Key) -> list[Key]:
    sources = self._regions.list_sources(key)
    return [source for source in sources if source in self._times]

  def find_candidates(self) -> list[Key]:
    """Return the values in whose regions an inf or a NaN originated.

    They are in program order. Those that reach no nonfinite output are left
    out.
    """
    # The outputs, and what may reach them.
    relevant = set(filter(_regions.is_output, self.iterations))
    stack = list(relevant)
    while stack:
      new = set(self._list_nonfinite_sources(stack.pop())) - relevant
      relevant |= new
      stack += new
    return [
      key
      for key in self.iterations
      if key in relevant
      and all(
        self._times[source] >= self._times[key]
        for source in self._list_nonfinite_sources(key)
      )
    ]


class _OriginSearch:
  """A search with a second program, which runs with healed equations.

  Args:
    traced: the first program.
    values: the nonfinite values of its run.
    bad_outputs: the indices of its nonfinite outputs.

  Attributes:
    program: the second program.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    values: _NonfiniteValues,
    bad_outputs: list[int],
  ) -> None:
    self._values = values
    self._bad_outputs = bad_outputs
    self._candidates = values.find_candidates()
    self._regions = traced.regions
    self._stats: dict[Key, _eqn_stats.EqnStats] = {}
    # The iterations in which each equation was measured.
    self._iterations: dict[Key, Iterations] = {}
    # Without the inf of a candidate, a value that reads it may overflow by
    # itself.
    measured = self._select_eqns([*self._candidates, *values.iterations])
    self.program = _instrumented_program.InstrumentedProgram(
      traced.restrict_outputs(bad_outputs),
      checked=set(filter(_regions.is_checked_value, measured.values())),
      measured=measured,
    )

  def _select_eqns(self, values: Iterable[Key]) -> dict[Key, Key]:
    """Return the equations to measure, each with the value that it leads to.

    Args:
      values: the values whose regions are measured if they are not too large.
        The region of the first one always is.
    """
    eqns: dict[Key, Key] = {}
    for key in values:
      region = self._regions.list_region(key)
      # Movement is measured only where a constant is moved.
      computing = [
        x
        for x in region
        if self._regions.visits[x].eqn.primitive.name not in _MOVEMENT
      ]
      more = dict.fromkeys(computing or region, key) | eqns
      if eqns and len(more) > _MAX_MEASURED:
        break
      eqns = more
    return eqns

  def find_origins(self) -> list[Origin]:
    """Return the origins, in the order in which they ran."""
    initial = bad_outputs = self._measure([])
    suspects = list(filter(_regions.is_argument, self._candidates))
    suspects += self._list_faults([])
    revealed: list[Key] = []
    for _ in range(_MAX_ROUNDS if suspects else 0):
      bad_outputs = self._measure([*suspects, *revealed])
      if not bad_outputs:
        break
      revealed += self._list_faults([*suspects, *revealed])
    outputs = self._find_reached([*suspects, *revealed], initial - bad_outputs)
    keys = (
      [key for key in suspects if outputs.get(key)]
      or [key for key in revealed if outputs.get(key)]
      or suspects
      or self._list_first_nonfinite()
    )
    origins = [
      Origin(
        key,
        self._iterations.get(key, ()),
        self._stats.get(key),
        outputs.get(key) or frozenset(self._bad_outputs),
      )
      for key in keys
    ]
    get_time = lambda x: self._values.get_time(x.key, x.iterations)
    return sorted(origins, key=get_time)

  def _find_reached(
    self, suspects: list[Key], outputs: frozenset[int]
  ) -> dict[Key, frozenset[int]]:
    """Return which of these outputs each suspect reaches."""
    reached: dict[Key, frozenset[int]] = {}
    healed = suspects
    for key in sorted(suspects)[:_MAX_SUSPECTS] if outputs else ():
      others = [x for x in healed if x != key]
      _, bad_outputs = self._run(others)
      reached[key] = bad_outputs & outputs
      if not reached[key]:
        # It is harmless, and a mask may be necessary for a later overflow.
        healed = others
    return reached

  def _measure(self, healed: list[Key]) -> frozenset[int]:
    """Measure the equations that are not healed, with the others healed.

    Returns:
      The nonfinite outputs.
    """
    record, bad_outputs = self._run(healed)
    iterations = self._values.iterations | record.first_nonfinite
    for key, value in self.program.measured.items():
      if key not in healed:
        self._stats[key] = record.stats[key]
        num_loops = len(self._regions.list_loops(key))
        self._iterations[key] = iterations[value][:num_loops]
    return bad_outputs

  def _list_faults(self, healed: list[Key]) -> list[Key]:
    """Return the other equations that were an origin in the last run."""
    stats = {key: x for key, x in self._stats.items() if key not in healed}
    return [key for key, x in stats.items() if x.is_origin] or [
      key for key, x in stats.items() if x.is_nan_origin
    ]

  def _run(
    self, healed: list[Key]
  ) -> tuple[_instrumented_program.RunRecord, frozenset[int]]:
    """Run the program, and return its record and the nonfinite outputs."""
    inputs = list(self.program.traced.inputs)
    for _, i in filter(_regions.is_argument, healed):
      inputs[i] = _eqn_stats.heal_array(inputs[i])
    record = self.program.run(inputs, healed)
    indices = _host_values.list_nonfinite(record.outs)
    return record, frozenset(self._bad_outputs[i] for i in indices)

  def _list_first_nonfinite(self) -> list[Key]:
    """Return what first was nonfinite in the region of each candidate.

    No operation makes an inf or a NaN of finite operands, so one is written in
    the program, or is in an argument. If all equations are finite, only the
    compiled program as a whole makes a candidate nonfinite: return the last.
    """
    first_keys: dict[Key, None] = {}
    for candidate in self._candidates:
      region = self._regions.list_region(candidate)
      measured = list(filter(self._stats.__contains__, region))
      nonfinite = [x for x in measured if self._stats[x].is_nonfinite.any()]
      sources = self._regions.list_sources(candidate)
      inf_args = filter(self._values.inf_args.__contains__, sources)
      last_keys = [*measured[-1:], *region[-1:], candidate]
      key = [*inf_args, *nonfinite, *last_keys][0]
      self._iterations.setdefault(key, self._values.iterations[candidate])
      first_keys[key] = None
    return list(first_keys)
