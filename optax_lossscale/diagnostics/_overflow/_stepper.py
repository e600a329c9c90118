"""Runs a jaxpr one operation at a time, and marks what is not finite."""

import abc
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeVar

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._overflow import (
  _bits,
  _marks,
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
  """An equation that may be entered.

  Attributes:
    eqn: the equation.
    inputs: the values that it reads.
    place: where it stands.
    has_effect: whether it must be carried out only once. If it may be done
      again, the marks of what it returns are asked for, and not the arrays.
    used: which of its outputs are asked for; all, if not given.
  """

  eqn: core.JaxprEqn
  inputs: list[_marks.Value]
  place: _jaxprs.Place
  has_effect: bool
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
    self._cache: dict[Any, Any] = {}

  @abc.abstractmethod
  def enter(self, entry: Entry) -> list[_marks.Value] | None:
    """Runs the jaxprs of a call, a loop or a branch.

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

    @functools.cache
    def place_of(eqn: core.JaxprEqn | None) -> _jaxprs.Place:
      return place if eqn is None else place.at(eqn, closed.jaxpr)

    def written(
      x: Any, atom: _jaxprs.Atom, eqn: core.JaxprEqn | None
    ) -> _marks.Value:
      array = self.runner.lift(x, atom)
      return self.constant(array, "constant", place_of(eqn))

    def step(
      eqn: core.JaxprEqn, inputs: list[_marks.Value]
    ) -> list[_marks.Value]:
      return self._step(eqn, inputs, place_of(eqn))

    outs = _jaxprs.interpret(closed, inputs, step, written=written, used=used)
    return [out or _marks.Value(None) for out in outs]

  def constant(
    self, array: Any, name: str, place: _jaxprs.Place
  ) -> _marks.Value:
    """A value that no operation has made."""
    if _bits.is_finite(array):
      return _marks.Value(array)
    own = _bits.not_finite(array)
    origin = _report.describe(name, [], place, self.runner.axis, array, own)
    bit = self.origins.add(origin, is_constant=not _bits.has_nan(array))
    return self.origins.value(array, _bits.fill(None, array, bit))

  def _step(
    self, eqn: core.JaxprEqn, inputs: list[_marks.Value], place: _jaxprs.Place
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    has_effect = self.cached(_jaxprs.has_effect, eqn)
    entry = Entry(eqn, inputs, place, has_effect)
    entered = self.enter(entry) if has_effect else None
    if entered is not None:
      return entered
    run = self.cached(self.runner.equation, eqn)
    arrays = [value.array for value in inputs]
    outs = run(*arrays)
    finite = list(map(_bits.is_finite, outs))
    if all(finite):
      return list(map(_marks.Value, outs))
    if not has_effect:
      asked = [not is_finite for is_finite in finite]
      entered = self.enter(entry._replace(used=asked)) or []
      known = _marks.bits_of_all(entered)
      if known:
        return self.origins.agree(outs, finite, entered, known)
    name, axis = _jaxprs.name_of(eqn), self.runner.axis
    describe = functools.partial(_report.describe, name, arrays, place, axis)
    atoms = zip(inputs, eqn.invars, strict=True)
    op = _marks.Operation(
      run=None if has_effect else run,
      inputs=[_marks.Value(v.array) if _is_literal(x) else v for v, x in atoms],
      neutral=_NEUTRAL.get(name),
      describe=describe,
    )
    return self.origins.mark(op, outs, finite)

  def cached(self, make: Callable[[Any], _Made], thing: Any) -> _Made:
    """What a function makes of an equation or a jaxpr, made once."""
    key = make, thing
    if key not in self._cache:
      self._cache[key] = make(thing)
    return self._cache[key]


def _is_literal(atom: _jaxprs.Atom) -> bool:
  return isinstance(atom, core.Literal)
