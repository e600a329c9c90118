"""How to walk into calls, loops, branches and shard_map."""

import collections
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _bits, _marks, _runners, _sources

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
  if _jaxprs.called_jaxpr(eqn) is not None:
    return _enter_call
  return _ENTER.get(eqn.primitive.name)


def _enter_call(
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _sources.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  place = place.step(_jaxprs.call_name(eqn))
  return stepper.run(_jaxprs.called_jaxpr(eqn), inputs, place)


def _enter_cond(
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _sources.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  index = stepper.runner.scalar(inputs[0].array)
  if index is None:
    return None
  branches = eqn.params["branches"]
  index = min(max(int(index), 0), len(branches) - 1)
  place = place.step(f"cond(branch {index})")
  return stepper.run(branches[index], inputs[1:], place)


def _enter_while(
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _sources.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  first = eqn.params["cond_nconsts"]
  second = first + eqn.params["body_nconsts"]
  cond_consts, body_consts = inputs[:first], inputs[first:second]
  carry = inputs[second:]
  patience = Patience(stepper.origins)
  i = 0
  while True:
    its_place = place.step(f"while[{i}]")
    (flag,) = stepper.run_body(
      eqn.params["cond_jaxpr"], [*cond_consts, *carry], its_place, patience
    )
    goes_on = stepper.runner.scalar(flag.array)
    if goes_on is None:
      return None
    if not goes_on:
      return carry
    carry = stepper.run_body(
      eqn.params["body_jaxpr"], [*body_consts, *carry], its_place, patience
    )
    i += 1


def _enter_scan(
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _sources.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  params = eqn.params
  first = params["num_consts"]
  second = first + params["num_carry"]
  consts, carry, xs = inputs[:first], inputs[first:second], inputs[second:]
  patience = Patience(stepper.origins)
  rows: list[list[_marks.Value]] = []
  # The index is that of the slice, so that the backward pass over an iteration
  # has the number of this iteration.
  order = range(params["length"])
  for i in reversed(order) if params["reverse"] else order:
    x = [_take(stepper, value, i) for value in xs]
    outs = stepper.run_body(
      params["jaxpr"],
      [*consts, *carry, *x],
      place.step(f"scan[{i}]"),
      patience,
    )
    carry = outs[: len(carry)]
    row = outs[len(carry) :]
    rows.append(row if arrays_too else list(map(_only_marks, row)))
  if params["reverse"]:
    rows.reverse()
  if not rows:
    return None
  axis = stepper.runner.axis
  columns = zip(*rows, strict=True)
  ys = [_stack(stepper, list(column), axis, arrays_too) for column in columns]
  return [*carry, *ys]


def _take(stepper: Any, value: _marks.Value, i: int) -> _marks.Value:
  array = stepper.runner.take(value.array, i)
  if value.marks is None:
    return _marks.Value(array)
  marks = stepper.runner.take(value.marks, i)
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
  return stepper.origins.value(array, _runners.stack(marks, axis))


def _enter_shard_map(
  stepper: Any,
  eqn: core.JaxprEqn,
  inputs: list[_marks.Value],
  place: _sources.Place,
  arrays_too: bool,
) -> list[_marks.Value] | None:
  is_within = isinstance(stepper.runner, _runners.ShardRunner)
  # An abstract mesh has no devices to run on.
  if is_within or not isinstance(eqn.params["mesh"], jax.sharding.Mesh):
    return None
  runner = _runners.ShardRunner(eqn)
  values = [_move(stepper, runner.enter, i, v) for i, v in enumerate(inputs)]
  inner = type(stepper)(stepper.origins, stepper.describe, runner)
  closed = _jaxprs.closed(eqn.params["jaxpr"])
  outs = inner.run(closed, values, place.step("shard_map"))
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
  return stepper.origins.value(array, move(i, value.marks))


_ENTER: dict[str, Enter] = {
  "cond": _enter_cond,
  "scan": _enter_scan,
  "shard_map": _enter_shard_map,
  "while": _enter_while,
}
