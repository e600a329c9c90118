"""A program that also returns whether values inside of it are finite.

Only scalars are added to the program, and only scalars leave the device: for
each checked value (see ``_dataflow``), the iteration in which it first was not
finite; and for each *measured* equation, what a report needs. A measured
equation can also be *healed*: its nonfinite results are replaced by a number.
"""

from collections.abc import Collection, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _eqns, _interpret, _state_threading
from optax_lossscale.diagnostics import _effects, _host_values
from optax_lossscale.diagnostics._overflow import _dataflow, _measurement

_NEVER = np.iinfo(np.int32).max


class RunRecord(NamedTuple):
  """The record of a run of an instrumented program.

  Attributes:
    outs: the outputs of the program that it returns.
    first_nonfinite: for each checked value that was nonfinite, the iteration of
      each loop around it in which it first was.
    stats: the statistics of each measured equation.
  """

  outs: list[Any]
  first_nonfinite: dict[_dataflow.Key, tuple[int, ...]]
  stats: dict[_dataflow.Key, _measurement.EqnStats]


class InstrumentedProgram:
  """A compiled program with flags.

  Args:
    closed_jaxpr: the program.
    dataflow: its checked values.
    compiler_options: the options of XLA.
    checked: the keys of the values to check; by default all of them.
    measured: the positions of the equations to measure.
    output_indices: the indices of the outputs to return; by default all of
      them.
    measures_all: whether to check the result of each equation, and to measure
      each when it first is an origin, instead of its last execution within the
      limits of a run.

  The arguments are attributes, too.
  """

  def __init__(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    dataflow: _dataflow.Dataflow,
    compiler_options: dict[str, Any],
    *,
    checked: Collection[_dataflow.Key] | None = None,
    measured: Collection[_dataflow.Key] = (),
    output_indices: Sequence[int] | None = None,
    measures_all: bool = False,
  ) -> None:
    self.closed_jaxpr, self.dataflow = closed_jaxpr, dataflow
    self.compiler_options = compiler_options
    self.checked = dataflow.checked if checked is None else sorted(checked)
    self.measured = sorted(dataflow.eqns if measures_all else measured)
    self.output_indices = (
      range(len(closed_jaxpr.jaxpr.outvars))
      if output_indices is None
      else output_indices
    )
    self.measures_all = measures_all
    self._run = jax.jit(self._eval_program, compiler_options=compiler_options)

  def run(
    self,
    inputs: Sequence[Any],
    healed: Collection[_dataflow.Key] = (),
    heal_value: float = 0.0,
    limits: dict[_dataflow.Key, int] | None = None,
    *,
    has_prints: bool = False,
  ) -> RunRecord:
    """Run the program.

    Args:
      inputs: its inputs.
      healed: the positions of the equations to heal.
      heal_value: the number that replaces an inf or a NaN.
      limits: for some loops, the last iteration to be measured. Each equation
        is measured in its last execution until then.
      has_prints: whether this run prints and logs what the program does.

    Returns:
      A :class:`RunRecord`.
    """
    limits = limits or {}
    shared = _Inputs(
      np.array([key in healed for key in self.measured], bool),
      np.float32(heal_value),
      {x: np.int32(limits.get(x, _NEVER)) for x in self.dataflow.loops},
      np.bool_(has_prints),
    )
    with np.errstate(all="ignore"):  # JAX folds casts of literals with NumPy.
      outs, flags, stats = self._run(shared, *inputs)
    flags, stats = _host_values.to_host((flags, stats))
    first_nonfinite = {
      key: tuple(row[1:].tolist()) for key, row in flags.items() if row[0]
    }
    return RunRecord(outs, first_nonfinite, stats)

  def _eval_program(self, shared: "_Inputs", *inputs: Any) -> Any:
    instrumenter = _Instrumenter(shared, self)
    state = instrumenter.make_state()
    jaxpr = self.closed_jaxpr.jaxpr
    # Keep equations alive whose flags are needed, even if their results
    # are not.
    indices = sorted({key[0] for key in [*self.checked, *self.measured]})
    live_vars = [var for i in indices for var in jaxpr.eqns[i].outvars]
    outvars = [jaxpr.outvars[i] for i in self.output_indices]
    program = _interpret.replace_outvars(
      self.closed_jaxpr, [*outvars, *live_vars]
    )
    outs = instrumenter.eval_jaxpr(
      _state_threading.Frame(program), inputs, state
    )
    flags = {key: state[key] for key in self.checked}
    stats = {key: state[key] for key in self.measured}
    return outs[: len(outvars)], flags, stats


class _Inputs(NamedTuple):
  """The inputs of the instrumentation.

  Attributes:
    is_healed: whether each measured equation is healed; bool[equations].
    heal_value: the number that replaces an inf or a NaN; float32[].
    limits: the last iteration of each loop to be measured; int32[] each.
    has_prints: whether equations that print are run; bool[].
  """

  is_healed: Any
  heal_value: Any
  limits: Any
  has_prints: Any


class _Instrumenter(_effects.PrintRemover):
  """Evaluates a program, and records whether its values are finite.

  The state has, by key: for a checked value, whether it was nonfinite, followed
  by the iterations in which it first was, int32[1 + loops]; for a measured
  equation, its ``EqnStats``.
  """

  def __init__(self, shared: _Inputs, program: InstrumentedProgram) -> None:
    super().__init__(shared)
    self._program = program
    self._dataflow = program.dataflow
    self._checked = set(program.checked)
    self._index_by_measured = {key: i for i, key in enumerate(program.measured)}
    # The equations that are measured, or have a checked result.
    self._changed = {*program.measured, *(key[:-1] for key in program.checked)}
    self._keys_by_eqn: dict[_dataflow.Key, list[_dataflow.Key]] = {}
    for key in [*program.checked, *program.measured]:
      # The prefixes of a key are the positions of the equations around it.
      for i in range(1, len(key) - 1, 2):
        self._keys_by_eqn.setdefault(key[:i], []).append(key)

  def make_state(self) -> _state_threading.State:
    """Return the state before the program runs."""
    state: _state_threading.State = {
      key: jnp.zeros(1 + len(self._dataflow.list_loops(key)), jnp.int32)
      for key in self._checked
    }
    return state | {
      key: _measurement.make_empty_stats(self._dataflow.eqns[key])
      for key in self._index_by_measured
    }

  def select_keys(
    self, visit: _state_threading.Visit
  ) -> list[_dataflow.Key] | None:
    keys = self._keys_by_eqn.get(visit.path)
    return super().select_keys(visit) if keys is None else keys

  def is_unchanged(self, visit: _state_threading.Visit) -> bool:
    return visit.path not in self._changed and super().is_unchanged(visit)

  def eval_print(self, eqn: core.JaxprEqn, inputs: list[Any]) -> None:
    print_fun = _eqns.eqn_as_fun(eqn)
    lax.cond(self.shared.has_prints, print_fun, lambda *_: [], *inputs)

  def lift_const(self, value: Any, atom: _eqns.Atom) -> Any:
    return _interpret.as_array(value, atom)

  def end_iteration(
    self,
    frame: _state_threading.Frame,
    outs: list[Any],
    state: _state_threading.State,
  ) -> None:
    end = len(frame.closed_jaxpr.jaxpr.eqns)
    for i, out in enumerate(outs):
      key = (*frame.path, end, _dataflow.OUTPUT + i)
      self._check(key, out, frame, state)

  def eval_eqn(
    self,
    visit: _state_threading.Visit,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> Sequence[Any]:
    outs = super().eval_eqn(visit, inputs, state)
    eqn, frame, key = visit.eqn, visit.frame, visit.path
    if key in self._index_by_measured:
      stats = _measurement.measure_eqn(eqn, inputs, outs)
      is_current = self._is_current(frame, state[key])
      update = functools.partial(jnp.where, is_current)
      state[key] = jax.tree.map(update, stats, state[key])
      is_healed = self.shared.is_healed[self._index_by_measured[key]]
      outs = _measurement.heal(
        eqn, inputs, outs, is_healed, stats, self.shared.heal_value
      )
    for i, out in enumerate(outs):
      self._check((*key, _dataflow.OUTPUT + i), out, frame, state)
    return outs

  def merge_devices(
    self,
    state: _state_threading.State,
    device_states: _state_threading.State,
  ) -> _state_threading.State:
    del state  # The state of each device includes it.
    maximum = functools.partial(jnp.max, axis=0)
    return {
      key: _select_first(x)
      if key in self._checked
      else jax.tree.map(maximum, x)
      for key, x in device_states.items()
    }

  def _check(
    self,
    key: _dataflow.Key,
    value: Any,
    frame: _state_threading.Frame,
    state: _state_threading.State,
  ) -> None:
    """Record when a checked value is nonfinite for the first time."""
    if key not in self._checked:
      return
    is_nonfinite = ~_measurement.is_finite(value)
    old = state[key]
    if not frame.iterations:
      # Within a `shard_map` the types of branches must be equal, also if a
      # value is the same on all devices: `maximum` varies like the old flag.
      state[key] = jnp.maximum(old, is_nonfinite.astype(jnp.int32))
      return
    first = jnp.stack([1, *frame.iterations]).astype(jnp.int32)
    state[key] = jnp.where(is_nonfinite & (old[0] == 0), first, old)

  def _is_current(
    self, frame: _state_threading.Frame, old_stats: _measurement.EqnStats
  ) -> Any:
    """Return whether new statistics of an equation replace the old ones."""
    if self._program.measures_all:
      return ~old_stats.is_fault
    loops = self._dataflow.list_loops((*frame.path, 0))
    is_within = jnp.array(True)
    # Iterations are ordered by the outermost loop first.
    for loop, i in reversed(list(zip(loops, frame.iterations, strict=True))):
      limit = self.shared.limits[loop]
      is_within = (i < limit) | (i == limit) & is_within
    return is_within


def _select_first(rows: Any) -> Any:
  """Return the earliest of the rows of a checked value, one for each device."""
  is_first = rows[:, 0] > 0
  columns = [is_first.any().astype(jnp.int32)]
  for column in rows.T[1:]:
    minimum = jnp.where(is_first, column, _NEVER).min()
    is_first &= column == minimum
    columns.append(minimum)
  return jnp.stack(columns)
