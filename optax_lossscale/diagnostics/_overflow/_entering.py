"""How to enter calls, loops, branches and shard_map."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._overflow import (
  _bits,
  _marks,
  _patience,
  _runners,
  _stepper,
)


class EnteringStepper(_stepper.Stepper):
  """Runs jaxprs one operation at a time, and those that these hold."""

  def enter(self, entry: _stepper.Entry) -> list[_marks.Value] | None:
    match self.cached(_jaxprs.higher_order_of, entry.eqn):
      case _jaxprs.Call(body):
        place = entry.place.step(_jaxprs.call_name(entry.eqn))
        return self.run(body, entry.inputs, place, entry.used)
      case _jaxprs.Cond(branches):
        return self._cond(branches, entry)
      case _jaxprs.While() as loop:
        return self._while(loop, entry)
      case _jaxprs.Scan() as scan if scan.length:
        return self._scan(scan, entry)
      case _jaxprs.ShardMap() as mapped:
        return self._shard_map(mapped, entry)
      case _:
        return None

  def _cond(
    self, branches: tuple[_jaxprs.ClosedJaxpr, ...], entry: _stepper.Entry
  ) -> list[_marks.Value] | None:
    which, *operands = entry.inputs
    index = _agreed(which.array)
    if index is None:
      return None
    index = min(max(int(index), 0), len(branches) - 1)
    place = entry.place.step(f"cond(branch {index})")
    return self.run(branches[index], operands, place, entry.used)

  def _while(
    self, loop: _jaxprs.While, entry: _stepper.Entry
  ) -> list[_marks.Value] | None:
    of_condition, of_body, carry = loop.split(entry.inputs)
    patience = _patience.Patience(self.origins)
    i = 0
    while True:
      place = entry.place.step(f"while[{i}]")
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
    self, scan: _jaxprs.Scan, entry: _stepper.Entry
  ) -> list[_marks.Value]:
    consts, carry, slices = scan.split(entry.inputs)
    patience = _patience.Patience(self.origins)
    rows = []
    # In the order of time. So the backward pass over an iteration has the
    # number of this iteration.
    order = range(scan.length)
    for i in reversed(order) if scan.reverse else order:
      place = entry.place.step(f"scan[{i}]")
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
    closed: _jaxprs.ClosedJaxpr,
    inputs: list[_marks.Value],
    place: _jaxprs.Place,
    patience: _patience.Patience,
  ) -> list[_marks.Value]:
    """Runs one iteration of a loop: at once, and step by step if need be."""
    if self.cached(_has_effects, closed):
      return self.run(closed, inputs, place)
    run = self.cached(self.runner.whole, closed)
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
    self, mapped: _jaxprs.ShardMap, entry: _stepper.Entry
  ) -> list[_marks.Value] | None:
    is_within = isinstance(self.runner, _runners.ShardRunner)
    # An abstract mesh has no devices to run on.
    if is_within or not isinstance(mapped.mesh, Mesh):
      return None
    runner = _runners.ShardRunner(mapped)
    place = entry.place.step("shard_map")
    values = self._move(runner.enter, entry.inputs)
    outs = EnteringStepper(self.origins, runner).run(mapped.body, values, place)
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


def _agreed(array: Any) -> Any:
  """The number in an array, or None if the devices do not agree on it."""
  found = np.unique(np.asarray(array))
  return found.item() if found.size == 1 else None


def _has_effects(closed: _jaxprs.ClosedJaxpr) -> bool:
  return _jaxprs.has_effects(closed.jaxpr)


def _only_marks(value: _marks.Value) -> _marks.Value:
  """The value without its array, which need not be kept."""
  return value if value.marks is not None else _marks.Value(None)
