"""How to walk into calls, loops, branches and shard_map."""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
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


def how_to_enter(eqn: core.JaxprEqn) -> _stepper.Enter | None:
  """What enters this equation, if anything does."""
  for look_into, enter in _ENTER:
    parts = look_into(eqn)
    if parts is not None:
      return functools.partial(enter, parts)
  return None


def _enter_call(
  called: _jaxprs.ClosedJaxpr, entry: _stepper.Entry
) -> list[_marks.Value]:
  place = entry.place.step(_jaxprs.call_name(entry.eqn))
  return entry.stepper.run(called, entry.inputs, place)


def _enter_cond(
  cond: _jaxprs.Cond, entry: _stepper.Entry
) -> list[_marks.Value] | None:
  which, *operands = entry.inputs
  index = entry.stepper.runner.scalar(which.array)
  if index is None:
    return None
  index = min(max(int(index), 0), len(cond.branches) - 1)
  place = entry.place.step(f"cond(branch {index})")
  return entry.stepper.run(cond.branches[index], operands, place)


def _enter_while(
  loop: _jaxprs.While, entry: _stepper.Entry
) -> list[_marks.Value] | None:
  stepper = entry.stepper
  first, second = loop.condition_consts, loop.body_consts
  cond_consts, rest = entry.inputs[:first], entry.inputs[first:]
  body_consts, carry = rest[:second], rest[second:]
  patience = _patience.Patience(stepper.origins)
  i = 0
  while True:
    place = entry.place.step(f"while[{i}]")
    (flags,) = stepper.run_body(
      loop.condition, [*cond_consts, *carry], place, patience
    )
    goes_on = stepper.runner.any_goes_on(flags.array)
    if goes_on is None:
      return None
    if not goes_on:
      return carry
    new = stepper.run_body(loop.body, [*body_consts, *carry], place, patience)
    carry = [
      _select(stepper, flags.array, a, b)
      for a, b in zip(new, carry, strict=True)
    ]
    i += 1


def _select(
  stepper: _stepper.Stepper,
  flags: jax.Array,
  new: _marks.Value,
  old: _marks.Value,
) -> _marks.Value:
  """What comes after an iteration that only some rows still need.

  Such is a loop that was mapped by ``vmap``: each row has a flag.
  """
  if flags.ndim == stepper.runner.axis:
    return new
  array = _runners.select(flags, new.array, old.array)
  if new.marks is None and old.marks is None:
    return _marks.Value(array)
  none = np.uint32(0)
  marks = [none if v.marks is None else v.marks for v in (new, old)]
  rows = np.expand_dims(flags, tuple(range(flags.ndim, array.ndim)))
  return stepper.origins.value(array, np.where(rows, *marks))


def _enter_scan(
  scan: _jaxprs.Scan, entry: _stepper.Entry
) -> list[_marks.Value] | None:
  stepper = entry.stepper
  consts, rest = entry.inputs[: scan.consts], entry.inputs[scan.consts :]
  carry, xs = rest[: scan.carry], rest[scan.carry :]
  patience = _patience.Patience(stepper.origins)
  rows: list[list[_marks.Value]] = []
  for i in _indices(scan):
    x = [_take(stepper, value, i) for value in xs]
    place = entry.place.step(f"scan[{i}]")
    outs = stepper.run_body(scan.body, [*consts, *carry, *x], place, patience)
    carry, row = outs[: scan.carry], outs[scan.carry :]
    rows.append(row if entry.arrays_too else list(map(_only_marks, row)))
  ys = _columns(stepper, rows, scan.reverse, entry.arrays_too)
  return [*carry, *ys] if rows else None


def _enter_hi_scan(
  scan: _jaxprs.HiScan, entry: _stepper.Entry
) -> list[_marks.Value] | None:
  """Its carry is in a Ref, so that each iteration runs step by step."""
  stepper = entry.stepper
  rows = []
  for i in _indices(scan):
    values = [
      _take(stepper, value, i) if is_slice else value
      for value, is_slice in zip(entry.inputs, scan.slices, strict=True)
    ]
    place = entry.place.step(f"scan[{i}]")
    rows.append(stepper.run(scan.body, values, place))
  if not rows:  # JAX itself fails at this, outside of `jit`.
    avals: list[Any] = [var.aval for var in entry.eqn.outvars]
    return [_marks.Value(jnp.zeros(x.shape, x.dtype)) for x in avals]
  return _columns(stepper, rows, scan.reverse, arrays_too=True)


def _indices(scan: _jaxprs.Scan | _jaxprs.HiScan) -> Iterable[int]:
  """The index of the slice of each iteration, in the order of time.

  So the backward pass over an iteration has the number of this iteration.
  """
  order = range(scan.length)
  return reversed(order) if scan.reverse else order


def _take(
  stepper: _stepper.Stepper, value: _marks.Value, i: int
) -> _marks.Value:
  array = stepper.runner.take(value.array, i)
  take = lambda marks: np.take(marks, i, stepper.runner.axis)
  return stepper.origins.moved(value, array, take)


def _only_marks(value: _marks.Value) -> _marks.Value:
  """The value without its array, which need not be kept."""
  return value if value.marks is not None else _marks.Value(None)


def _columns(
  stepper: _stepper.Stepper,
  rows: list[list[_marks.Value]],
  reverse: bool,
  arrays_too: bool,
) -> list[_marks.Value]:
  """What the iterations have returned, as the stacked outputs of a scan."""
  columns = zip(*(reversed(rows) if reverse else rows), strict=True)
  return [_stack(stepper, column, arrays_too) for column in columns]


def _stack(
  stepper: _stepper.Stepper, values: tuple[_marks.Value, ...], arrays_too: bool
) -> _marks.Value:
  axis = stepper.runner.axis
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
  mapped: _jaxprs.ShardMap, entry: _stepper.Entry
) -> list[_marks.Value] | None:
  origins = entry.stepper.origins
  is_within = isinstance(entry.stepper.runner, _runners.ShardRunner)
  # An abstract mesh has no devices to run on.
  if is_within or not isinstance(mapped.mesh, Mesh):
    return None
  runner = _runners.ShardRunner(mapped)
  inner = _stepper.Stepper(origins, runner, how_to_enter)
  place = entry.place.step("shard_map")
  values = _move(origins, runner.enter, entry.inputs)
  return _move(origins, runner.leave, inner.run(mapped.body, values, place))


def _move(
  origins: _marks.Origins,
  move: Callable[[int, jax.Array], jax.Array],
  values: list[_marks.Value],
) -> list[_marks.Value]:
  """All values, moved into a ``shard_map`` or out of it."""

  def move_one(i: int, value: _marks.Value) -> _marks.Value:
    on_devices = lambda marks: _bits.placed_like(marks, value.array)
    move_marks = lambda marks: np.asarray(move(i, on_devices(marks)))
    return origins.moved(value, move(i, value.array), move_marks)

  return [move_one(i, value) for i, value in enumerate(values)]


# What tells the parts of an equation, and what is given these and enters it.
_ENTER: tuple[
  tuple[Callable[[core.JaxprEqn], Any], Callable[..., Any]], ...
] = (
  (_jaxprs.called_jaxpr, _enter_call),
  (_jaxprs.scan_of, _enter_scan),
  (_jaxprs.while_of, _enter_while),
  (_jaxprs.cond_of, _enter_cond),
  (_jaxprs.shard_map_of, _enter_shard_map),
  (_jaxprs.hi_scan_of, _enter_hi_scan),
  (_jaxprs.hi_call_of, _enter_call),
)
