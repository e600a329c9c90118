"""Runs a jaxpr one operation at a time, and marks what is not finite."""

import collections
from collections.abc import Callable, Sequence
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
  _walk,
)
from optax_lossscale.diagnostics import _progress
from optax_lossscale.diagnostics._overflow import (
  _bits,
  _loops,
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
  locate: Callable[[], _places.EqnLocation]
  has_effect: bool
  used: list[bool] | None = None

  def within(self, step: str) -> _places.EqnLocation:
    """The place of what it runs in this step."""
    return self.locate().push_eqn_path(step)


class Stepper:
  """Runs jaxprs one operation at a time.

  Attributes:
    origins: where to note what is found.
    runner: how to run one operation.
    progress: where to tell which operation is run.
  """

  def __init__(
    self,
    origins: _marks.Origins,
    runner: _runners.Runner,
    progress: _progress.ProgressLine,
  ):
    self.origins = origins
    self.runner = runner
    self.progress = progress
    self._cache: dict[Any, Any] = {}
    self._loops = _walk.EqnSearch(_is_loop, _equations.subjaxprs)

  def run(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _places.EqnLocation,
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
    def place_of(eqn: core.JaxprEqn | None) -> _places.EqnLocation:
      return place if eqn is None else place.locate(eqn, closed.jaxpr)

    def written(
      x: Any, atom: _equations.Atom, eqn: core.JaxprEqn | None
    ) -> _marks.Value:
      array = self.runner.lift_const(x, atom)
      return self.constant(array, "constant", place_of(eqn))

    numbers = self._cached(_numbers_of, closed.jaxpr)

    def step(
      eqn: core.JaxprEqn, inputs: list[_marks.Value]
    ) -> list[_marks.Value]:
      path = "/".join([*place.eqn_path, _lines.get_op_name(eqn)])
      self.progress.set_description(
        f"{path}, operation {numbers[eqn]} of {len(numbers)}"
      )
      return self._step(eqn, inputs, functools.partial(place_of, eqn))

    outs = _interpret.interpret_jaxpr(
      closed, inputs, step, lift_const=written, used_outputs=used
    )
    return [out or _marks.Value(None) for out in outs]

  def constant(
    self, array: Any, name: str, place: _places.EqnLocation
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
    locate: Callable[[], _places.EqnLocation],
  ) -> list[_marks.Value]:
    """Carries out one equation; enters it if its results are not finite."""
    has_effect = self._cached(_equations.has_effect, eqn)
    entry = _Entry(eqn, inputs, locate, has_effect)
    # To compile what is around a loop, and the loop, takes twice as long.
    is_entered = has_effect or self._holds_loop(eqn)
    entered = self._enter(entry) if is_entered else None
    if entered is not None:
      return entered
    run = self._cached(self._runner_of, eqn)
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
    name, axis = _lines.get_op_name(eqn), self.runner.axis
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

  def _runner_of(self, eqn: core.JaxprEqn) -> _runners.RunFn:
    """What runs an equation as a whole."""
    loop = self._loop(eqn)
    return self.runner.make_eqn_fun(eqn) if loop is None else loop.whole

  def _loop(self, eqn: core.JaxprEqn) -> Any:
    """What runs a loop, as a whole or in parts; None if it is none."""
    return self._cached(self._make_loop, eqn)

  def _make_loop(self, eqn: core.JaxprEqn) -> _loops.StoppableLoop | None:
    if not _is_loop(eqn) or self._cached(_equations.has_effect, eqn):
      return None
    match self._cached(_higher_order.parse_higher_order, eqn):
      case _higher_order.While() as loop:
        return self.runner.make_loop(eqn, loop)
      case _higher_order.Scan() as scan if scan.length:
        return self.runner.make_loop(eqn, scan)
      case _:
        return None

  def _holds_loop(self, eqn: core.JaxprEqn) -> bool:
    """Whether this is a call or a branch with a loop inside."""
    return not _is_loop(eqn) and self._loops.any_inside(eqn)

  def _enter(self, entry: _Entry) -> list[_marks.Value] | None:
    """Runs the jaxprs of a call, a loop or a branch.

    Returns:
      The values of its outputs; None if it cannot be entered.
    """
    match self._cached(_higher_order.parse_higher_order, entry.eqn):
      case _higher_order.Call(body):
        place = entry.within(_lines.format_call(entry.eqn))
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
    count = 0
    while True:
      flags = self._flags(loop, [*of_condition, *carry], entry)
      goes_on = _agreed(self._any(flags))
      if goes_on is None:
        return None
      if not goes_on:
        return list(carry)
      inputs = [*of_condition, *of_body, *carry]
      count, carry, outs = self._advance(loop, count, inputs, entry)
      if outs is not None and flags.ndim > self.runner.axis:
        flags = self._flags(loop, [*of_condition, *carry], entry)
      place = entry.within(f"while[{count - 1}]")
      inputs = [*of_body, *carry]
      new = self._iterate(loop.body, inputs, outs, place, patience)
      pairs = zip(new, carry, strict=True)
      carry = [self._select(flags, *pair) for pair in pairs]

  def _flags(
    self, loop: _higher_order.While, inputs: list[_marks.Value], entry: _Entry
  ) -> jax.Array:
    """The condition of a loop: one flag, or one for each row of ``vmap``."""
    if self._cached(_has_effects, loop.condition):
      place = entry.within("while")
      return self.run(loop.condition, inputs, place)[0].array
    run = self._cached(self.runner.compile_jaxpr, loop.condition)
    return run(*(value.array for value in inputs))[0]

  def _any(self, flags: jax.Array) -> np.ndarray:
    """Whether a row needs another iteration, on each device."""
    axes = tuple(range(self.runner.axis, flags.ndim))
    return np.any(np.asarray(flags), axis=axes)

  def _select(
    self, flags: jax.Array, new: _marks.Value, old: _marks.Value
  ) -> _marks.Value:
    """What comes after an iteration that only some rows still need.

    Such is a loop that was mapped by ``vmap``: each row has a flag.
    """
    if flags.ndim == self.runner.axis:
      return new
    array = _runners.select_rows(flags, new.array, old.array)
    rows = np.expand_dims(flags, tuple(range(flags.ndim, array.ndim)))
    select = lambda new, old: np.where(rows, new, old)
    return self.origins.made(array, [new, old], select)

  def _scan(
    self, scan: _higher_order.Scan, entry: _Entry
  ) -> list[_marks.Value]:
    consts, carry, slices = scan.split(entry.inputs)
    patience = _Patience(self.origins)
    rows: dict[int, list[_marks.Value]] = {}
    count = 0
    while count < scan.length:
      inputs = [*consts, *carry, *slices]
      count, carry, outs = self._advance(scan, count, inputs, entry)
      i = _loops.get_iteration_index(scan, count - 1)
      inputs = [*consts, *carry, *slices]
      given = _loops.get_body_inputs(scan, count - 1, inputs, self._take)
      place = entry.within(f"scan[{i}]")
      new = self._iterate(scan.body, given, outs, place, patience)
      carry, row = new[: scan.num_carry], new[scan.num_carry :]
      rows[i] = row if entry.has_effect else list(map(_only_marks, row))
    stacked = []
    for n in range(len(scan.body.jaxpr.outvars) - scan.num_carry):
      column = {i: row[n] for i, row in rows.items()}
      stacked.append(self._stack(column, scan.length, entry.has_effect))
    return [*carry, *stacked]

  def _take(self, value: _marks.Value, i: int) -> _marks.Value:
    array = self.runner.take_slice(value.array, i)
    take = lambda marks: np.take(marks, i, self.runner.axis)
    return self.origins.made(array, [value], take)

  def _stack(
    self, rows: dict[int, _marks.Value], length: int, has_arrays: bool
  ) -> _marks.Value:
    """What a scan stacks, of the rows by their numbers.

    If the arrays are not needed, those that are missing have no marks.
    """
    axis = self.runner.axis
    array = None
    if has_arrays:
      array = _runners.stack_in_chunks(
        [rows[i].array for i in range(length)], axis
      )
    marked = {i: x.marks for i, x in rows.items() if x.marks is not None}
    if not marked:
      return _marks.Value(array)
    none = _bits.no_marks(next(iter(marked.values())))
    marks = [marked.get(i, none) for i in range(length)]
    return self.origins.value(array, np.stack(marks, axis))

  def _advance(
    self,
    loop: _loops.AnyLoop,
    count: int,
    inputs: list[_marks.Value],
    entry: _Entry,
  ) -> tuple[int, Sequence[_marks.Value], list[Any] | None]:
    """Runs a loop up to the next iteration that is to be looked at.

    Returns:
      The number of iterations that have run then; the carry that the last one
      was given; and what its body returned, or None if it has not run, since it
      has effects.
    """
    _, carry, _ = _loops.split_loop_inputs(loop, inputs)
    if entry.has_effect:
      return count + 1, carry, None
    arrays = [value.array for value in inputs]
    stop = self._loop(entry.eqn).advance(count, arrays)
    if stop.done > count + 1:  # All that came before was finite.
      carry = list(map(_marks.Value, stop.carry))
    return stop.done, carry, stop.outs

  def _iterate(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: list[_marks.Value],
    outs: list[Any] | None,
    place: _places.EqnLocation,
    patience: "_Patience",
  ) -> list[_marks.Value]:
    """Follows an iteration of a loop that returned this, step by step."""
    if outs is None:
      return self.run(closed, inputs, place)
    finite = list(map(_bits.is_finite, outs))
    if all(finite):
      return list(map(_marks.Value, outs))
    way = (*finite, *(value.marks is None for value in inputs))
    if patience.is_over(way):
      known = _marks.bits_of_all(inputs) or patience.known
      values = [_marks.Value(None)] * len(outs)
    else:
      asked = [not is_finite for is_finite in finite]
      values = self.run(closed, inputs, place, asked)
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
    values = self._move(runner.shard_input, entry.inputs)
    inside = Stepper(self.origins, runner, self.progress)
    outs = inside.run(mapped.body, values, place)
    return self._move(runner.gather_output, outs)

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
  return _equations.has_effectful_eqn(closed.jaxpr)


def _only_marks(value: _marks.Value) -> _marks.Value:
  """The value without its array, which need not be kept."""
  return value if value.marks is not None else _marks.Value(None)


def _numbers_of(jaxpr: core.Jaxpr) -> dict[core.JaxprEqn, int]:
  return {eqn: i + 1 for i, eqn in enumerate(jaxpr.eqns)}


def _is_loop(eqn: core.JaxprEqn) -> bool:
  return eqn.primitive.name in ("scan", "while")


def _is_literal(atom: _equations.Atom) -> bool:
  return isinstance(atom, core.Literal)
