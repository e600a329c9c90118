"""Runs a jaxpr one operation at a time, and marks what is not finite."""

import collections
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core
from jax.sharding import Mesh
import numpy as np

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _interpret,
  _lines,
  _places,
)
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
# A loop may go wrong in each of a million iterations. After as many as this
# that went wrong in the same way, meaning in the same inputs and outputs, what
# is not finite is blamed on what was found before.
_MOST_ITERATIONS = 30

_Made = TypeVar("_Made")


class _Entry(NamedTuple):
  """An equation that may be entered.

  Attributes:
    eqn: the equation.
    inputs: the values that it reads.
    locate: tells where it stands: it takes a look at a traceback.
    has_effect: whether it must be carried out only once. If it may be done
      again, the marks of what it returns are asked for, and not the arrays.
    used: which of its outputs are asked for; all, if not given.
  """

  eqn: core.JaxprEqn
  inputs: list[_marks.Value]
  locate: Callable[[], _places.Place]
  has_effect: bool
  used: list[bool] | None = None

  def within(self, step: str) -> _places.Place:
    """The place of what it runs in this step."""
    return self.locate().step(step)


class Stepper:
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    runner: how to run one operation.
  """

  def __init__(self, origins: _marks.Origins, runner: _runners.Runner):
    self.origins = origins
    self.runner = runner
    self._cache: dict[Any, Any] = {}

  def run(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _places.Place,
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
    def place_of(eqn: core.JaxprEqn | None) -> _places.Place:
      return place if eqn is None else place.at(eqn, closed.jaxpr)

    def written(
      x: Any, atom: _equations.Atom, eqn: core.JaxprEqn | None
    ) -> _marks.Value:
      array = self.runner.lift(x, atom)
      return self.constant(array, "constant", place_of(eqn))

    def step(
      eqn: core.JaxprEqn, inputs: list[_marks.Value]
    ) -> list[_marks.Value]:
      return self._step(eqn, inputs, functools.partial(place_of, eqn))

    outs = _interpret.interpret(
      closed, inputs, step, written=written, used=used
    )
    return [out or _marks.Value(None) for out in outs]

  def constant(
    self, array: Any, name: str, place: _places.Place
  ) -> _marks.Value:
    """A value that no operation has made."""
    if _bits.is_finite(array):
      return _marks.Value(array)
    own = _bits.not_finite(array)
    origin = _report.describe(name, [], place, self.runner.axis, array, own)
    bit = self.origins.add(origin, is_constant=not _bits.has_nan(array))
    return self.origins.value(array, _bits.fill(None, array, bit))

  def _step(
    self,
    eqn: core.JaxprEqn,
    inputs: list[_marks.Value],
    locate: Callable[[], _places.Place],
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    has_effect = self._cached(_equations.has_effect, eqn)
    entry = _Entry(eqn, inputs, locate, has_effect)
    entered = self._enter(entry) if has_effect else None
    if entered is not None:
      return entered
    run = self._cached(self.runner.equation, eqn)
    arrays = [value.array for value in inputs]
    outs = run(*arrays)
    finite = list(map(_bits.is_finite, outs))
    if all(finite):
      return list(map(_marks.Value, outs))
    if not has_effect:
      asked = [not is_finite for is_finite in finite]
      entered = self._enter(entry._replace(used=asked)) or []
      known = _marks.bits_of_all(entered)
      if known:
        return self.origins.agree(outs, finite, entered, known)
    name, axis = _lines.name_of(eqn), self.runner.axis
    describe = functools.partial(_report.describe, name, arrays, locate(), axis)
    atoms = zip(inputs, eqn.invars, strict=True)
    op = _marks.Operation(
      run=None if has_effect else run,
      inputs=[_marks.Value(v.array) if _is_literal(x) else v for v, x in atoms],
      neutral=_NEUTRAL.get(name),
      describe=describe,
    )
    return self.origins.mark(op, outs, finite)

  def _cached(self, make: Callable[[Any], _Made], thing: Any) -> _Made:
    """What a function makes of an equation or a jaxpr, made once."""
    key = make, thing
    if key not in self._cache:
      self._cache[key] = make(thing)
    return self._cache[key]

  def _enter(self, entry: _Entry) -> list[_marks.Value] | None:
    """Runs the jaxprs of a call, a loop or a branch.

    Returns:
      The values of its outputs; None if it cannot be entered.
    """
    match self._cached(_higher_order.higher_order_of, entry.eqn):
      case _higher_order.Call(body):
        place = entry.within(_lines.call_name(entry.eqn))
        return self.run(body, entry.inputs, place, entry.used)
      case _higher_order.Cond(branches):
        return self._cond(branches, entry)
      case _higher_order.While() as loop:
        return self._while(loop, entry)
      case _higher_order.Scan() as scan if scan.length:
        return self._scan(scan, entry)
      case _higher_order.ShardMap() as mapped:
        return self._shard_map(mapped, entry)
      case _:
        return None

  def _cond(
    self, branches: tuple[_equations.ClosedJaxpr, ...], entry: _Entry
  ) -> list[_marks.Value] | None:
    which, *operands = entry.inputs
    index = _agreed(which.array)
    if index is None:
      return None
    index = min(max(int(index), 0), len(branches) - 1)
    place = entry.within(f"cond(branch {index})")
    return self.run(branches[index], operands, place, entry.used)

  def _while(
    self, loop: _higher_order.While, entry: _Entry
  ) -> list[_marks.Value] | None:
    of_condition, of_body, carry = loop.split(entry.inputs)
    patience = _Patience(self.origins)
    i = 0
    while True:
      place = entry.within(f"while[{i}]")
      inputs = [*of_condition, *carry]
      (flags,) = self._iterate(loop.condition, inputs, place, patience)
      axes = tuple(range(self.runner.axis, flags.array.ndim))
      goes_on = _agreed(np.any(np.asarray(flags.array), axis=axes))
      if goes_on is None:
        return None
      if not goes_on:
        return list(carry)
      new = self._iterate(loop.body, [*of_body, *carry], place, patience)
      pairs = zip(new, carry, strict=True)
      carry = [self._select(flags.array, *pair) for pair in pairs]
      i += 1

  def _select(
    self, flags: jax.Array, new: _marks.Value, old: _marks.Value
  ) -> _marks.Value:
    """What comes after an iteration that only some rows still need.

    Such is a loop that was mapped by ``vmap``: each row has a flag.
    """
    if flags.ndim == self.runner.axis:
      return new
    array = _runners.select(flags, new.array, old.array)
    rows = np.expand_dims(flags, tuple(range(flags.ndim, array.ndim)))
    select = lambda new, old: np.where(rows, new, old)
    return self.origins.made(array, [new, old], select)

  def _scan(
    self, scan: _higher_order.Scan, entry: _Entry
  ) -> list[_marks.Value]:
    consts, carry, slices = scan.split(entry.inputs)
    patience = _Patience(self.origins)
    rows = []
    # In the order of time. So the backward pass over an iteration has the
    # number of this iteration.
    order = range(scan.length)
    for i in reversed(order) if scan.reverse else order:
      place = entry.within(f"scan[{i}]")
      inputs = [*consts, *carry, *(self._take(x, i) for x in slices)]
      outs = self._iterate(scan.body, inputs, place, patience)
      carry, row = outs[: scan.carry], outs[scan.carry :]
      rows.append(row if entry.has_effect else list(map(_only_marks, row)))
    columns = zip(*(reversed(rows) if scan.reverse else rows), strict=True)
    stack = functools.partial(self._stack, arrays_too=entry.has_effect)
    return [*carry, *map(stack, columns)]

  def _take(self, value: _marks.Value, i: int) -> _marks.Value:
    axis = self.runner.axis
    array = _runners.take(value.array, i, axis)
    take = lambda marks: np.take(marks, i, axis)
    return self.origins.made(array, [value], take)

  def _stack(
    self, values: tuple[_marks.Value, ...], arrays_too: bool
  ) -> _marks.Value:
    axis = self.runner.axis
    arrays = [value.array for value in values]
    array = _runners.stack(arrays, axis) if arrays_too else None
    stack = lambda *marks: np.stack(marks, axis)
    return self.origins.made(array, values, stack)

  def _iterate(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _places.Place,
    patience: "_Patience",
  ) -> list[_marks.Value]:
    """Runs one iteration of a loop: at once, and step by step if need be."""
    if self._cached(_has_effects, closed):
      return self.run(closed, inputs, place)
    run = self._cached(self.runner.whole, closed)
    outs = run(*(value.array for value in inputs))
    finite = list(map(_bits.is_finite, outs))
    if all(finite):
      return list(map(_marks.Value, outs))
    way = (*finite, *(value.marks is None for value in inputs))
    if patience.is_over(way):
      known = _marks.bits_of_all(inputs) or patience.known
      values = [_marks.Value(None)] * len(outs)
    else:
      values = self.run(closed, inputs, place)
      patience.note(way, _marks.bits_of_all(values))
      known = patience.known
    return self.origins.agree(outs, finite, values, known)

  def _shard_map(
    self, mapped: _higher_order.ShardMap, entry: _Entry
  ) -> list[_marks.Value] | None:
    is_within = isinstance(self.runner, _runners.ShardRunner)
    # An abstract mesh has no devices to run on.
    if is_within or not isinstance(mapped.mesh, Mesh):
      return None
    runner = _runners.ShardRunner(mapped)
    place = entry.within("shard_map")
    values = self._move(runner.enter, entry.inputs)
    outs = Stepper(self.origins, runner).run(mapped.body, values, place)
    return self._move(runner.leave, outs)

  def _move(
    self,
    move: Callable[[int, jax.Array], jax.Array],
    values: list[_marks.Value],
  ) -> list[_marks.Value]:
    """All values, moved into a ``shard_map`` or out of it."""

    def move_one(i: int, value: _marks.Value) -> _marks.Value:
      on_devices = lambda marks: _bits.placed_like(marks, value.array)
      move_marks = lambda marks: np.asarray(move(i, on_devices(marks)))
      return self.origins.made(move(i, value.array), [value], move_marks)

    return [move_one(i, value) for i, value in enumerate(values)]


class _Patience:
  """How many more iterations of a loop to run step by step.

  An iteration goes wrong in a way: which inputs and outputs are finite.
  """

  def __init__(self, origins: _marks.Origins) -> None:
    self._origins = origins
    self._seen: collections.Counter[tuple[bool, ...]] = collections.Counter()
    # A value of its own, so that none of its bits is given to another origin.
    self._found = _marks.Value(None)

  @property
  def known(self) -> int:
    """The bits of the origins that were found in this loop."""
    return self._found.bits

  def is_over(self, way: tuple[bool, ...]) -> bool:
    """Whether it is over for iterations that go wrong in this way."""
    return self.known > 0 and self._seen[way] >= _MOST_ITERATIONS

  def note(self, way: tuple[bool, ...], bits: int) -> None:
    """Notes the bits that were found in an iteration."""
    self._seen[way] += 1
    self._found = self._origins.value(None, np.array([self.known | bits]))


def _agreed(array: Any) -> Any:
  """The number in an array, or None if the devices do not agree on it."""
  found = np.unique(np.asarray(array))
  return found.item() if found.size == 1 else None


def _has_effects(closed: _equations.ClosedJaxpr) -> bool:
  return _equations.has_effects(closed.jaxpr)


def _only_marks(value: _marks.Value) -> _marks.Value:
  """The value without its array, which need not be kept."""
  return value if value.marks is not None else _marks.Value(None)


def _is_literal(atom: _equations.Atom) -> bool:
  return isinstance(atom, core.Literal)
