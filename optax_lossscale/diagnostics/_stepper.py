"""Runs a jaxpr one operation at a time, and marks what is not finite."""

from collections.abc import Callable
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _entering, _marks, _runners, _sources

# Operations whose result stays finite if an input that is not is replaced by
# this number, as long as nothing else is wrong.
_NEUTRAL = {
  **dict.fromkeys(("div", "log", "pow", "integer_pow", "rsqrt"), 1.0),
  **dict.fromkeys(
    (
      "add", "add_any", "concatenate", "conv_general_dilated",
      "convert_element_type", "cosh", "cumsum", "dot_general", "exp", "exp2",
      "expm1", "log1p", "mul", "psum", "psum_invariant", "reduce_sum",
      "reduce_window_sum", "scatter-add", "select_n", "sinh", "sqrt", "square",
      "sub", "tan",
    ),
    0.0,
  ),
}  # fmt: skip


class Stepper:
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    describe: what to note of an operation: a function of its name, the values
      that it read, its place, its output, the new entries of it that are not
      finite, and the runner.
    runner: how to run one operation.
  """

  def __init__(
    self,
    origins: _marks.Origins,
    describe: Callable[..., Any],
    runner: _runners.Runner,
  ):
    self.origins = origins
    self.describe = describe
    self.runner = runner
    self._runs: dict[int, tuple[Any, _runners.Run]] = {}

  def run(
    self,
    closed: core.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _sources.Place,
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

    def read(atom: Any) -> _marks.Value:
      if not isinstance(atom, core.Literal):
        return env[atom]
      aval: Any = atom.aval
      number = self.runner.lift(jnp.asarray(atom.val, aval.dtype), atom)
      return self.constant(number, "constant", its_place)

    for eqn, last_read in _jaxprs.needed_equations(jaxpr):
      its_place = place.at(eqn, jaxpr)
      outs = self._step(jaxpr, eqn, list(map(read, eqn.invars)), its_place)
      env.update(zip(eqn.outvars, outs, strict=True))
      for var in last_read:
        env.pop(var, None)
    return list(map(read, jaxpr.outvars))

  def constant(
    self, array: Any, name: str, place: _sources.Place
  ) -> _marks.Value:
    """A value that no operation has made."""
    if _marks.are_finite([array])[0]:
      return _marks.Value(array)
    describe = lambda out, own: self.describe(
      name, [], place, out, own, self.runner
    )
    op = _marks.Operation(None, [], None, True, False, describe)
    return _marks.mark(self.origins, op, [array])[0]

  def run_body(
    self,
    closed: core.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _sources.Place,
    patience: _entering.Patience,
  ) -> list[_marks.Value]:
    """Runs one iteration of a loop: at once, and step by step if need be."""
    if _jaxprs.runs_once(closed.jaxpr):
      return self.run(closed, inputs, place)
    run = self._kept(closed, lambda: self.runner.whole(closed))
    outs = run([value.array for value in inputs])
    finite = _marks.are_finite(outs)
    if all(finite):
      return list(map(_marks.Value, outs))
    if patience.is_over([*finite, *(v.marks is None for v in inputs)]):
      known = _marks.bits_of_all(inputs) or patience.known
      return [
        _marks.Value(out) if ok else _marks.blame(self.origins, out, known)
        for out, ok in zip(outs, finite, strict=True)
      ]
    values = self.run(closed, inputs, place)
    patience.known |= _marks.bits_of_all(values)
    return _marks.agree(self.origins, outs, values, patience.known)

  def _step(
    self,
    jaxpr: core.Jaxpr,
    eqn: core.JaxprEqn,
    inputs: list[_marks.Value],
    place: _sources.Place,
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    enter = _entering.how_to_enter(eqn)
    once = _jaxprs.has_effect(eqn)
    if enter is not None and once:
      entered = enter(self, eqn, inputs, place, True)
      if entered is not None:
        return entered
    is_literal = [isinstance(v, core.Literal) for v in eqn.invars]
    pairs = zip(eqn.invars, inputs, is_literal, strict=True)
    # A variable that is read twice is one input.
    read = list(
      {v: value for v, value, literal in pairs if not literal}.values()
    )
    run = self._kept(eqn, lambda: self.runner.equation(jaxpr, eqn))
    outs = run([value.array for value in read])
    if all(_marks.are_finite(outs)):
      return list(map(_marks.Value, outs))

    known = 0
    if enter is not None and not once:
      entered = enter(self, eqn, inputs, place, False)
      if entered is not None:
        known = _marks.bits_of_all(entered)
        if known:
          return _marks.agree(self.origins, outs, entered, known)
    name = _sources.primitive_name(eqn)
    describe = lambda out, own: self.describe(
      name, inputs, place, out, own, self.runner
    )
    literals = [v.val for v in eqn.invars if isinstance(v, core.Literal)]
    op = _marks.Operation(
      None if once else run,
      read,
      _NEUTRAL.get(name),
      any(map(_is_inf, literals)),
      any(map(_is_nan, literals)),
      describe,
    )
    return _marks.mark(self.origins, op, outs)

  def _kept(self, thing: Any, make: Callable[[], _runners.Run]) -> _runners.Run:
    """What ``make`` returns, made once for each equation or jaxpr."""
    # The thing is kept as well, so that no other gets its id.
    if id(thing) not in self._runs:
      self._runs[id(thing)] = thing, make()
    return self._runs[id(thing)][1]


def _is_inf(number: Any) -> bool:
  return bool(abs(number) == float("inf"))


def _is_nan(number: Any) -> bool:
  return bool(number != number)
