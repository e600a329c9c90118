"""Runs a jaxpr one operation at a time, and marks what is not finite."""

import abc
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeVar

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._overflow import (
  _bits,
  _marks,
  _refs,
  _report,
  _runners,
)

# Operations whose result stays finite if an input that is not is replaced by
# this number, as long as nothing else is wrong.
_NEUTRAL = {
  **dict.fromkeys(("div", "log", "log2", "pow", "integer_pow", "rsqrt"), 1.0),
  **dict.fromkeys(
    (
      "add", "add_any", "concatenate", "conv_general_dilated",
      "convert_element_type", "cosh", "cumsum", "dot_general", "exp", "exp2",
      "expm1", "log1p", "mul", "psum", "psum_invariant", "reduce_sum",
      "reduce_window_sum", "scatter-add", "select_n", "sinh", "sqrt", "square",
      "stack", "sub", "tan",
    ),
    0.0,
  ),
}  # fmt: skip


_Made = TypeVar("_Made")


class Entry(NamedTuple):
  """An equation that may be walked into.

  Attributes:
    eqn: the equation.
    inputs: the values that it reads.
    place: where it stands.
    once: whether it must be carried out only once. If it may be done again, the
      marks of what it returns are asked for, and not the arrays.
    used: which of its outputs are asked for; all, if not given.
  """

  eqn: core.JaxprEqn
  inputs: list[_marks.Value]
  place: _jaxprs.Place
  once: bool
  used: list[bool] | None = None


class Stepper(abc.ABC):
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    runner: how to run one operation.
  """

  def __init__(self, origins: _marks.Origins, runner: _runners.Runner):
    self.origins = origins
    self.runner = runner
    self._made: dict[tuple[Any, int], tuple[Any, Any]] = {}

  @abc.abstractmethod
  def enter(self, entry: Entry) -> list[_marks.Value] | None:
    """Walks into an equation.

    Returns:
      The values of its outputs; None if it cannot be entered.
    """

  def run(
    self,
    closed: _jaxprs.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
    used: list[bool] | None = None,
  ) -> list[_marks.Value]:
    """Runs a jaxpr.

    Args:
      closed: the jaxpr.
      inputs: a value for each of its inputs.
      place: where it stands.
      used: which of its outputs are asked for; all, if not given. What leads
        to no other is not run, such as the optimizer in a skipped step.

    Returns:
      A value for each of its outputs.
    """
    jaxpr = closed.jaxpr
    used = [True] * len(jaxpr.outvars) if used is None else used
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
      env[var] = self.constant(self.runner.lift(const, var), "constant", place)
    del inputs

    def read(atom: _jaxprs.Atom, its_place: _jaxprs.Place) -> _marks.Value:
      if not isinstance(atom, core.Literal):
        return env[atom]
      aval: Any = atom.aval
      number = self.runner.lift(jnp.asarray(atom.val, aval.dtype), atom)
      return self.constant(number, "constant", its_place)

    for eqn, last_read in _jaxprs.needed_equations(jaxpr, used):
      its_place = place.at(eqn, jaxpr)
      its_inputs = [read(atom, its_place) for atom in eqn.invars]
      outs = self._step(eqn, its_inputs, its_place)
      del its_inputs
      env.update(zip(eqn.outvars, outs, strict=True))
      for var in last_read:
        env.pop(var, None)
    outputs = zip(jaxpr.outvars, used, strict=True)
    nothing = _marks.Value(None)
    return [read(v, place) if asked else nothing for v, asked in outputs]

  def constant(
    self, array: Any, name: str, place: _jaxprs.Place
  ) -> _marks.Value:
    """A value that no operation has made."""
    is_ref = _refs.is_ref(array)
    held = array[...] if is_ref else array
    if _bits.is_finite(held):
      return _marks.Value(array)
    own = _bits.not_finite(held)
    origin = _report.describe(name, [], place, self.runner.axis, held, own)
    bit = self.origins.add(origin, is_constant=not _bits.has_nan(held))
    marks = _bits.fill(None, held, bit)
    if is_ref:
      return self.origins.in_ref(_marks.Value(array), marks)
    return self.origins.value(array, marks)

  def _step(
    self, eqn: core.JaxprEqn, inputs: list[_marks.Value], place: _jaxprs.Place
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    once = self.kept(_jaxprs.has_effect, eqn)
    entry = Entry(eqn, inputs, place, once)
    if once:
      entered = self.enter(entry)
      if entered is not None:
        return entered
    run = self.kept(self.runner.equation, eqn)
    arrays = [value.array for value in inputs]
    outs = run(*arrays)
    name, axis = _jaxprs.name_of(eqn), self.runner.axis
    describe = functools.partial(_report.describe, name, arrays, place, axis)
    if once:
      followed = _refs.follow(self.origins, eqn, inputs, outs, describe)
      if followed is not None:
        return followed
    finite = list(map(_bits.is_finite, outs))
    if all(finite):
      return list(map(_marks.Value, outs))
    if not once:
      asked = [not is_finite for is_finite in finite]
      entered = self.enter(entry._replace(used=asked)) or []
      known = _marks.bits_of_all(entered)
      if known:
        return _marks.agree(self.origins, outs, finite, entered, known)
    op = _operation(eqn, inputs, None if once else run, describe)
    return _marks.mark(self.origins, op, outs, finite)

  def kept(self, make: Callable[[Any], _Made], thing: Any) -> _Made:
    """What a function makes of a thing, made once."""
    # The thing is kept as well, so that no other gets its id.
    key = make, id(thing)
    if key not in self._made:
      self._made[key] = thing, make(thing)
    return self._made[key][1]


def _operation(
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  run: _runners.Run | None,
  describe: Callable[[Any, np.ndarray], _report.Overflow],
) -> _marks.Operation:
  is_literal = lambda atom: isinstance(atom, core.Literal)
  literals: Any = filter(is_literal, eqn.invars)
  sizes = [float(np.abs(literal.val)) for literal in literals]
  pairs = zip(inputs, map(is_literal, eqn.invars), strict=True)
  return _marks.Operation(
    run=run,
    # A number that is written there is part of the operation, without marks.
    inputs=[_marks.Value(v.array) if written else v for v, written in pairs],
    neutral=_NEUTRAL.get(_jaxprs.name_of(eqn)),
    # The largest of an inf and a NaN is a NaN.
    writes_inf=bool(np.max(sizes, initial=0) == np.inf),
    describe=describe,
  )
