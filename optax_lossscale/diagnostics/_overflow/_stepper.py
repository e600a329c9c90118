"""Runs a jaxpr one operation at a time, and marks what is not finite."""

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
  _patience,
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
  """An equation that is walked into.

  Attributes:
    stepper: what walks.
    eqn: the equation.
    inputs: the values that it reads.
    place: where it stands.
    arrays_too: whether the arrays are asked for, and not only their marks.
  """

  stepper: "Stepper"
  eqn: core.JaxprEqn
  inputs: list[_marks.Value]
  place: _jaxprs.Place
  arrays_too: bool


# What walks into an equation. It returns the values of its outputs, or None if
# the equation cannot be entered.
Enter = Callable[[Entry], list[_marks.Value] | None]


class Stepper:
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    runner: how to run one operation.
    how_to_enter: what enters an equation, if anything does.
  """

  def __init__(
    self,
    origins: _marks.Origins,
    runner: _runners.Runner,
    how_to_enter: Callable[[core.JaxprEqn], Enter | None],
  ):
    self.origins = origins
    self.runner = runner
    self.how_to_enter = how_to_enter
    self._made: dict[tuple[str, int], tuple[Any, Any]] = {}

  def run(
    self,
    closed: _jaxprs.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
  ) -> list[_marks.Value]:
    """Runs a jaxpr.

    Args:
      closed: the jaxpr.
      inputs: a value for each of its inputs.
      place: where it stands.

    Returns:
      A value for each of its outputs.
    """
    jaxpr = closed.jaxpr
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

    for eqn, last_read in _jaxprs.needed_equations(jaxpr):
      its_place = place.at(eqn, jaxpr)
      its_inputs = [read(atom, its_place) for atom in eqn.invars]
      outs = self._step(eqn, its_inputs, its_place)
      del its_inputs
      env.update(zip(eqn.outvars, outs, strict=True))
      for var in last_read:
        env.pop(var, None)
    return [read(atom, place) for atom in jaxpr.outvars]

  def constant(
    self, array: Any, name: str, place: _jaxprs.Place
  ) -> _marks.Value:
    """A value that no operation has made."""
    is_ref = _refs.is_ref(array)
    held = array[...] if is_ref else array
    if _bits.are_finite([held])[0]:
      return _marks.Value(array)
    describe = functools.partial(_report.describe, name, [], place, self.runner)
    op = _marks.Operation(None, [], None, True, describe)
    (value,) = _marks.mark(self.origins, op, [held])
    if not is_ref or value.marks is None:
      return value
    return self.origins.in_ref(_marks.Value(array), value.marks)

  def run_body(
    self,
    closed: _jaxprs.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
    patience: _patience.Patience,
  ) -> list[_marks.Value]:
    """Runs one iteration of a loop: at once, and step by step if need be."""
    has_effect = self._kept(
      "effect", closed, lambda: _jaxprs.runs_once(closed.jaxpr)
    )
    if has_effect:
      return self.run(closed, inputs, place)
    run = self._kept("whole", closed, lambda: self.runner.whole(closed))
    outs = run([value.array for value in inputs])
    finite = _bits.are_finite(outs)
    if all(finite):
      return list(map(_marks.Value, outs))
    if patience.is_over([*finite, *(v.marks is None for v in inputs)]):
      known = _marks.bits_of_all(inputs) or patience.known
      return [
        _marks.Value(out) if ok else _marks.blame(self.origins, out, known)
        for out, ok in zip(outs, finite, strict=True)
      ]
    values = self.run(closed, inputs, place)
    patience.remember(_marks.bits_of_all(values))
    return _marks.agree(self.origins, outs, values, patience.known)

  def _step(
    self,
    eqn: core.JaxprEqn,
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    enter = self._kept("enter", eqn, lambda: self.how_to_enter(eqn))
    once = self._kept("effect", eqn, lambda: _jaxprs.has_effect(eqn))
    entry = Entry(self, eqn, inputs, place, arrays_too=once)
    if enter is not None and once:
      entered = enter(entry)
      if entered is not None:
        return entered
    variables = _runners.variables_of(eqn)
    run = self._kept("equation", eqn, lambda: self.runner.equation(eqn))
    by_id = dict(zip(map(id, eqn.invars), inputs, strict=True))
    read = [by_id[id(var)] for var in variables]
    outs = run([value.array for value in read])
    op = self._operation(eqn, None if once else run, read, inputs, place)
    if once:
      followed = _refs.follow(self.origins, eqn, inputs, outs, op.describe)
      if followed is not None:
        return followed
    if all(_bits.are_finite(outs)):
      return list(map(_marks.Value, outs))
    if enter is not None and not once:
      entered = enter(entry) or []
      known = _marks.bits_of_all(entered)
      if known:
        return _marks.agree(self.origins, outs, entered, known)
    return _marks.mark(self.origins, op, outs)

  def _operation(
    self,
    eqn: core.JaxprEqn,
    run: _runners.Run | None,
    read: list[_marks.Value],
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
  ) -> _marks.Operation:
    name = _jaxprs.name_of(eqn)
    literals = [v.val for v in eqn.invars if isinstance(v, core.Literal)]
    return _marks.Operation(
      run=run,
      inputs=read,
      neutral=_NEUTRAL.get(name),
      writes_inf=any(map(_is_inf, literals))
      and not any(map(_is_nan, literals)),
      describe=functools.partial(
        _report.describe,
        name,
        [value.array for value in inputs],
        place,
        self.runner,
      ),
    )

  def _kept(self, purpose: str, thing: Any, make: Callable[[], _Made]) -> _Made:
    """What ``make`` returns, made once for each purpose and thing."""
    # The thing is kept as well, so that no other gets its id.
    key = purpose, id(thing)
    if key not in self._made:
      self._made[key] = thing, make()
    return self._made[key][1]


def _is_inf(number: Any) -> bool:
  return bool(np.any(np.abs(number) == np.inf))


def _is_nan(number: Any) -> bool:
  return bool(np.any(number != number))
