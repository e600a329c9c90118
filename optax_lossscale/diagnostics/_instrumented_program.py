"""A program that also returns whether values inside of it are finite.

Only scalars are added to the program, and only scalars leave the device: for
each checked value (see ``_regions``), the iteration in which it first was not
finite; and for each *measured* equation, what a report needs. A measured
equation can also be *healed*: its nonfinite results are replaced by a number.
Tagged gradients can be multiplied by a number, and updates replaced by one, to
see what depends on them.

Prints appear only once, so all runs but the first leave them out. A callback
that returns something is called by each run, and is reported if it has an
effect, as an ``io_callback`` has. A Ref belongs to the program, since the
tracer copies the Refs among its arguments, so each run may read and write it.
"""

from collections.abc import Collection, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import (
  _eqns,
  _regions,
  _state_threading,
  _walk,
)
from optax_lossscale.diagnostics import (
  _eqn_stats,
  _host_values,
  _outputs,
  _tracing,
)

_NEVER = np.iinfo(np.int32).max
# The kinds of tags whose values can be changed, each with the number that does
# not change them.
_NO_CHANGE = {"unscaled": 1.0, "backward": 1.0, "masked_updates": np.nan}


class RunRecord(NamedTuple):
  """The record of a run of an instrumented program.

  Attributes:
    outs: the outputs of the program.
    first_nonfinite: for each checked value that was nonfinite, the iteration of
      each loop around it in which it first was.
    stats: the statistics of each measured equation.
  """

  outs: list[Any]
  first_nonfinite: dict[_regions.Key, tuple[int, ...]]
  stats: dict[_regions.Key, _eqn_stats.EqnStats]


class InstrumentedProgram:
  """A compiled program with flags.

  Args:
    traced: the program.
    checked: the keys of the values to check; by default all of them.
    measured: the positions of the equations to measure, each with the value
      in whose region it is. In a loop, it is measured in the iteration in which
      this value first was nonfinite, or in the last one. If any are measured,
      no run may change the values of tags.

  The arguments are attributes, too.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    *,
    checked: Collection[_regions.Key] | None = None,
    measured: Mapping[_regions.Key, _regions.Key] | None = None,
  ) -> None:
    self.traced = traced
    self.checked = set(
      filter(_regions.is_checked_value, traced.regions.reads)
      if checked is None
      else checked
    )
    self.measured = dict(sorted((measured or {}).items()))
    self.replaceable = {
      key: group
      for key, group in traced.tags.items()
      if group.kind in _NO_CHANGE and not self.measured
    }
    options = make_compiler_options(traced.inputs)
    self._run = jax.jit(self._eval_program, compiler_options=options)

  def run(
    self,
    inputs: Sequence[Any],
    healed: Collection[_regions.Key] = (),
    *,
    replaced: Mapping[_outputs.TagGroup, float] | None = None,
    has_prints: bool = False,
  ) -> RunRecord:
    """Run the program.

    Args:
      inputs: its inputs.
      healed: the positions of the equations to heal.
      replaced: for some groups of tags, the number that replaces updates, or by
        which unscaled gradients are multiplied.
      has_prints: whether this run prints and logs what the program does.

    Returns:
      A :class:`RunRecord`.
    """
    shared = _Inputs(
      np.array([key in healed for key in self.measured], bool),
      {
        group: np.float32((replaced or {}).get(group, _NO_CHANGE[group.kind]))
        for group in self.replaceable.values()
      },
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
    regions = self.traced.regions
    state: _state_threading.State = {
      key: jnp.zeros(1 + len(regions.list_loops(key)), jnp.int32)
      for key in self.checked
    }
    state |= {
      key: _eqn_stats.make_empty_stats(regions.visits[key].eqn)
      for key in self.measured
    }
    frame = _state_threading.Frame(self.traced.closed_jaxpr)
    outs = _Instrumenter(shared, self).eval_jaxpr(frame, inputs, state)
    flags = {key: state[key] for key in self.checked}
    stats = {key: state[key] for key in self.measured}
    return outs, flags, stats


def make_compiler_options(inputs: Sequence[Any]) -> dict[str, Any]:
  """Return options with which a program is cheap to compile.

  Args:
    inputs: the inputs of the program, whose devices run it.

  Returns:
    The ``compiler_options=`` of ``jax.jit``. With them, XLA keeps each
    conversion to float16 and back, and with it the overflow of the conversion.
  """
  options: dict[str, Any] = {
    "xla_allow_excess_precision": False,
    # On CPU, this halves the time to compile, and runs take 1.4 times as long.
    "xla_backend_optimization_level": 0,
    # XLA would interpret a reduction of a large constant, such as the magnitude
    # of a mask, which takes ten seconds for a million entries.
    "xla_disable_hlo_passes": "constant_folding",
  }
  arrays = [x for x in inputs if isinstance(x, jax.Array)]
  devices = [*arrays[0].devices()] if arrays else jax.devices()
  if devices[0].platform == "gpu":
    # To try several kernels for each matmul takes longer than to run it.
    options["xla_gpu_autotune_level"] = 0
  return options


def has_callback(jaxpr: core.Jaxpr) -> bool:
  """Return whether a jaxpr calls an ``io_callback`` that returns something."""
  is_callback = lambda eqn: (
    eqn.primitive.name == "io_callback" and bool(eqn.outvars)
  )
  return _walk.EqnSearch(is_callback, _eqns.subjaxprs).any_in_jaxpr(jaxpr)


class _Inputs(NamedTuple):
  """The inputs of the instrumentation.

  Attributes:
    is_healed: whether each measured equation is healed; bool[equations].
    substitutes: the number that changes the values of the tags of each group,
      float32[].
    has_prints: whether equations that print are run; bool[].
  """

  is_healed: Any
  substitutes: dict[_outputs.TagGroup, Any]
  has_prints: Any


class _Instrumenter(_state_threading.StateThreader):
  """Evaluates a program, and records whether its values are finite.

  The state has, by key: for a checked value, whether it was nonfinite, followed
  by the iterations in which it first was, int32[1 + loops]; for a measured
  equation, its ``EqnStats``.
  """

  def __init__(self, shared: _Inputs, program: InstrumentedProgram) -> None:
    super().__init__(shared)
    self._program = program
    self._keys_by_eqn: dict[_regions.Key, set[_regions.Key]] = {}
    state_keys = program.checked.union(program.measured)
    for key in [*program.replaceable, *state_keys]:
      # The state of the value in whose region an equation is, is read.
      keys = state_keys & {key, program.measured.get(key, key)}
      # The prefixes of a key are the positions of the equations around it.
      for i in range(1, len(key) - 1, 2):
        self._keys_by_eqn.setdefault(key[:i], set()).update(keys)

  def select_keys(
    self, visit: _state_threading.Visit
  ) -> list[_regions.Key] | None:
    keys = self._keys_by_eqn.get(visit.path)
    return None if keys is None else sorted(keys)

  def end_iteration(
    self,
    frame: _state_threading.Frame,
    outs: list[Any],
    state: _state_threading.State,
  ) -> None:
    end = len(frame.closed_jaxpr.jaxpr.eqns)
    for i, out in enumerate(outs):
      key = (*frame.path, end, _regions.OUTPUT + i)
      self._check(key, out, frame, state)

  def eval_eqn(
    self,
    visit: _state_threading.Visit,
    inputs: list[Any],
    state: _state_threading.State,
  ) -> Sequence[Any]:
    outs = super().eval_eqn(visit, inputs, state)
    eqn, frame, key = visit.eqn, visit.frame, visit.path
    if _state_threading.is_print(eqn):
      print_fun = _eqns.eqn_as_fun(eqn)
      lax.cond(self.shared.has_prints, print_fun, lambda *_: [], *inputs)
    measured, replaceable = self._program.measured, self._program.replaceable
    if key in replaceable:
      group = replaceable[key]
      x = self.shared.substitutes[group]
      outs = [
        jnp.where(jnp.isnan(x), y, jnp.full_like(y, x))
        if group.kind == "masked_updates"
        else y * x.astype(y.dtype)
        for y in outs
      ]
    if key in measured:
      stats = _eqn_stats.measure_eqn(eqn, inputs, outs)
      # In a loop, the value that it leads to may already be nonfinite.
      value_state = state.get(measured[key], np.zeros(1, np.int32))
      select = functools.partial(jnp.where, value_state[0] == 0)
      state[key] = jax.tree.map(select, stats, state[key])
      is_healed = self.shared.is_healed[list(measured).index(key)]
      outs = _eqn_stats.heal(eqn, inputs, outs, is_healed, stats)
    for i, out in enumerate(outs):
      self._check((*key, _regions.OUTPUT + i), out, frame, state)
    return outs

  def merge_devices(
    self, device_states: _state_threading.State
  ) -> _state_threading.State:
    return {
      key: _select_first(x)
      if key in self._program.checked
      else jax.tree.map(lambda flags: jnp.max(flags, 0), x)
      for key, x in device_states.items()
    }

  def _check(
    self,
    key: _regions.Key,
    value: Any,
    frame: _state_threading.Frame,
    state: _state_threading.State,
  ) -> None:
    """Record when a checked value is nonfinite for the first time."""
    if key not in self._program.checked:
      return
    is_nonfinite = ~_eqn_stats.is_finite(value)
    old = state[key]
    first = jnp.stack([1, *frame.iterations]).astype(jnp.int32)
    state[key] = jnp.where(is_nonfinite & (old[0] == 0), first, old)


def _select_first(rows: Any) -> Any:
  """Return the earliest of the rows of a checked value, one for each device."""
  is_first = rows[:, 0] > 0
  columns = [is_first.any().astype(jnp.int32)]
  for column in rows.T[1:]:
    minimum = jnp.where(is_first, column, _NEVER).min()
    is_first &= column == minimum
    columns.append(minimum)
  return jnp.stack(columns)
