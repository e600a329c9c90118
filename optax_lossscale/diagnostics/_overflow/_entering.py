"""How to walk into calls, loops, branches and shard_map."""

import collections
from collections.abc import Callable, Iterable
import functools
from typing import Any

from jax.extend import core
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._overflow import _bits, _marks, _runners

# What enters an equation: a function of the stepper, the equation, the values
# that it reads, its place, and whether the arrays are asked for, and not only
# their marks. It returns None if the equation cannot be entered.
Enter = Callable[..., list[_marks.Value] | None]

# A loop may go wrong in each of a million iterations. After as many as this
# that went wrong in the same way, meaning in the same inputs and outputs, what
# is not finite is blamed on what was found before.
_MOST_ITERATIONS = 30


class Patience:
  """How many more iterations of a loop to run step by step."""

  def __init__(self, origins: _marks.Origins) -> None:
    self._origins = origins
    self._seen: collections.Counter[tuple[bool, ...]] = collections.Counter()
    # A value of its own, so that none of its bits is given to another origin.
    self._found = _marks.Value(None)

  @property
  def known(self) -> int:
    """The bits of the origins that were found in this loop."""
    return self._found.bits

  def remember(self, bits: int) -> None:
    """Adds to the bits that are known."""
    self._found = self._origins.value(None, None, self.known | bits)

  def is_over(self, finite: list[bool]) -> bool:
    """Whether it is over for iterations in which these values are finite."""
    self._seen[tuple(finite)] += 1
    return self.known > 0 and self._seen[tuple(finite)] > _MOST_ITERATIONS


def how_to_enter(eqn: core.JaxprEqn) -> Enter | None:
  """What enters this equation, if anything does."""
  for look_into, enter in _ENTER:
    parts = look_into(eqn)
    if parts is not None:
      return functools.partial(enter, parts)
  return None


def _enter_call(
  called: _jaxprs.ClosedJaxpr,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  return stepper.run(called, inputs, place.step(_jaxprs.call_name(eqn)))


def _enter_cond(
  cond: _jaxprs.Cond,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  index = stepper.runner.scalar(inputs[0].array)
  if index is None:
    return None
  index = min(max(int(index), 0), len(cond.branches) - 1)
  place = place.step(f"cond(branch {index})")
  return stepper.run(cond.branches[index], inputs[1:], place)


def _enter_while(
  loop: _jaxprs.While,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  first = loop.condition_consts
  second = first + loop.body_consts
  cond_consts, body_consts = inputs[:first], inputs[first:second]
  carry = inputs[second:]
  patience = Patience(stepper.origins)
  i = 0
  while True:
    its_place = place.step(f"while[{i}]")
    (flags,) = stepper.run_body(
      loop.condition, [*cond_consts, *carry], its_place, patience
    )
    goes_on = stepper.runner.any_goes_on(flags.array)
    if goes_on is None:
      return None
    if not goes_on:
      return carry
    new = stepper.run_body(
      loop.body, [*body_consts, *carry], its_place, patience
    )
    carry = [
      _select(stepper, flags.array, a, b)
      for a, b in zip(new, carry, strict=True)
    ]
    i += 1


def _select(
  stepper: Any, flags: Any, new: _marks.Value, old: _marks.Value
) -> _marks.Value:
  """What comes after an iteration that only some rows still need.

  Such is a loop that was mapped by ``vmap``: each row has a flag.
  """
  if flags.ndim == stepper.runner.axis:
    return new
  array = _runners.select(flags, new.array, old.array)
  if new.marks is None and old.marks is None:
    return _marks.Value(array)
  marks = [
    _bits.no_marks(value.array) if value.marks is None else value.marks
    for value in (new, old)
  ]
  flags = np.expand_dims(flags, tuple(range(flags.ndim, array.ndim)))
  return stepper.origins.value(array, np.where(flags, *marks))


def _enter_scan(
  scan: _jaxprs.Scan,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  second = scan.consts + scan.carry
  consts, carry = inputs[: scan.consts], inputs[scan.consts : second]
  xs = inputs[second:]
  patience = Patience(stepper.origins)
  rows: list[list[_marks.Value]] = []
  for i in _indices(scan):
    x = [_take(stepper, value, i) for value in xs]
    outs = stepper.run_body(
      scan.body, [*consts, *carry, *x], place.step(f"scan[{i}]"), patience
    )
    carry = outs[: scan.carry]
    row = outs[scan.carry :]
    rows.append(row if arrays_too else list(map(_only_marks, row)))
  ys = _columns(stepper, rows, scan.reverse, arrays_too)
  return [*carry, *ys] if rows else None


def _enter_hi_scan(
  scan: _jaxprs.HiScan,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  """Its carry is in a Ref, so that each iteration runs step by step."""
  rows = []
  for i in _indices(scan):
    values = [
      _take(stepper, value, i) if is_slice else value
      for value, is_slice in zip(inputs, scan.slices, strict=True)
    ]
    rows.append(stepper.run(scan.body, values, place.step(f"scan[{i}]")))
  if not rows:  # JAX itself fails at this, outside of `jit`.
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return [_marks.Value(jnp.zeros(x.shape, x.dtype)) for x in avals]
  return _columns(stepper, rows, scan.reverse, True)


def _indices(scan: Any) -> Iterable[int]:
  """The index of the slice of each iteration, in the order of time.

  So the backward pass over an iteration has the number of this iteration.
  """
  order = range(scan.length)
  return reversed(order) if scan.reverse else order


def _columns(
  stepper: Any,
  rows: list[list[_marks.Value]],
  reverse: bool,
  arrays_too: bool,
) -> list[_marks.Value]:
  """What the iterations have returned, as the stacked outputs of a scan."""
  columns = zip(*(reversed(rows) if reverse else rows), strict=True)
  axis = stepper.runner.axis
  return [_stack(stepper, list(column), axis, arrays_too) for column in columns]


def _take(stepper: Any, value: _marks.Value, i: int) -> _marks.Value:
  array = stepper.runner.take(value.array, i)
  if value.marks is None:
    return _marks.Value(array)
  marks = np.take(value.marks, i, stepper.runner.axis)
  return stepper.origins.value(array, marks)


def _only_marks(value: _marks.Value) -> _marks.Value:
  """The value without its array, which need not be kept."""
  return value if value.marks is not None else _marks.Value(None)


def _stack(
  stepper: Any, values: list[_marks.Value], axis: int, arrays_too: bool
) -> _marks.Value:
  array = None
  if arrays_too:
    array = _runners.stack([value.array for value in values], axis)
  marked = [value.marks for value in values if value.marks is not None]
  if not marked:
    return _marks.Value(array)
  none = _bits.no_marks(marked[0])
  marks = [none if v.marks is None else v.marks for v in values]
  return stepper.origins.value(array, np.stack(marks, axis))


def _enter_shard_map(
  mapped: _jaxprs.ShardMap,
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _jaxprs.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  is_within = isinstance(stepper.runner, _runners.ShardRunner)
  # An abstract mesh has no devices to run on.
  if is_within or not isinstance(mapped.mesh, Mesh):
    return None
  runner = _runners.ShardRunner(mapped)
  values = [_move(stepper, runner.enter, i, v) for i, v in enumerate(inputs)]
  inner = type(stepper)(stepper.origins, stepper.describe, runner)
  outs = inner.run(mapped.body, values, place.step("shard_map"))
  return [_move(stepper, runner.leave, i, v) for i, v in enumerate(outs)]


def _move(
  stepper: Any,
  move: Callable[[int, Any], Any],
  i: int,
  value: _marks.Value,
) -> _marks.Value:
  array = move(i, value.array)
  if value.marks is None:
    return _marks.Value(array)
  marks = move(i, _bits.placed_like(value.marks, value.array))
  return stepper.origins.value(array, np.asarray(marks))


# What tells the parts of an equation, and what is given these and enters it.
_ENTER: tuple[tuple[Callable[[core.JaxprEqn], Any], Enter], ...] = (
  (_jaxprs.called_jaxpr, _enter_call),
  (_jaxprs.scan_of, _enter_scan),
  (_jaxprs.while_of, _enter_while),
  (_jaxprs.cond_of, _enter_cond),
  (_jaxprs.shard_map_of, _enter_shard_map),
  (_jaxprs.hi_scan_of, _enter_hi_scan),
  (_jaxprs.hi_call_of, _enter_call),
)
