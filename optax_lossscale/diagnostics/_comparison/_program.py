"""Runs a program with each of its products in float32 or in half precision.

The program is what `autocast` made of a function, whatever transformed it
later. It is traced once more, operation by operation, and all that is in half
precision there is kept in float32: operands, results, and what stands between
them. A product then rounds its operands and its result, or does not, as is said
when the program runs. So one compiled program serves all runs. A loop, a branch
and a ``shard_map`` are made anew, and carry along what is noted of the products
inside.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _interpret,
  _lines,
  _operations,
  _places,
  _types,
  _walk,
)
from optax_lossscale.diagnostics import _numbers


class Row(NamedTuple):
  """Products of one kind in one place, which are told of together.

  Attributes:
    primitive: JAX's name of the operation.
    names: the names of its place.
    backward: whether it belongs to a backward pass.
    dtype: the half precision.
  """

  primitive: str
  names: _places.EqnNames
  backward: bool
  dtype: np.dtype


class Statistics(NamedTuple):
  """What is noted of all runs of one product.

  Attributes:
    times: how often it ran; float32[].
    largest: the largest magnitude of its operands and its result; float32[].
    entries: how many entries the operands and the result had; float32[3].
    lost: how many of them become zero in half precision; float32[3].
    subnormal: how many become subnormal; float32[3].
  """

  times: Any
  largest: Any
  entries: Any
  lost: Any
  subnormal: Any


# Of these, what returns nothing is not run: it would print each time.
_SILENT = re.compile("callback|print")
_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN

# How a product may run: as in float32, in half precision, or as in float32 with
# numbers that are a little off.
EXACT, HALF, OFF = range(3)
# What is a little off has another fourth last bit, and so another size, by
# 2**-20 of itself at most.
_FOURTH_LAST_BIT = 8

# For each row what was noted of it.
Notes = list[Statistics]
# What equations return, and what was noted after them.
Done = tuple[Sequence[Any], Notes]


class Program(NamedTuple):
  """A program with a choice for each product, to be called while it is traced.

  Attributes:
    rows: the products.
    ways: how each row runs: ``EXACT``, ``HALF`` or ``OFF``; int32[rows].
    place: where the walk through it has come to.
  """

  rows: "Rows"
  ways: Any
  place: _places.EqnLocation = _places.EqnLocation()

  def run(
    self, closed: _equations.ClosedJaxpr, inputs: Sequence[Any], notes: Notes
  ) -> Done:
    """Runs a jaxpr.

    Args:
      closed: the jaxpr.
      inputs: its inputs. What is in half precision there may be float32 here.
      notes: what was noted before.

    Returns:
      Its outputs, none of which is in half precision, and what was noted after
      it.
    """

    def step(eqn: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
      nonlocal notes
      outs, notes = self._equation(eqn, closed.jaxpr, inputs, notes)
      return outs

    written = lambda x, *_: self._widened(x)
    values = list(map(self._widened, inputs))
    outs = _interpret.interpret_jaxpr(closed, values, step, lift_const=written)
    return outs, notes

  def _widened(self, x: Any) -> Any:
    """An array, in float32 if it is in half precision."""
    return jnp.asarray(x, jnp.float32) if self._is_half(x) else x

  def _is_half(self, x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype in self.rows.dtypes and not _types.is_ref(x)

  def _equation(
    self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, inputs: list[Any], notes: Notes
  ) -> Done:
    if is_product(eqn, self.place):
      row = self.rows.number(eqn, self.place.locate(eqn, jaxpr))
      if row is None:
        return _equations.eqn_as_fun(_operations.as_highest_float32(eqn))(
          *inputs
        ), notes
      return self._product(eqn, row, inputs, notes)
    has_half = any(self._is_half(v.aval) for v in [*eqn.invars, *eqn.outvars])
    call = None
    if has_half or self.rows.are_in(eqn):
      call = self.rows.higher_order_of(eqn)
    if call is not None:
      inside = self._replace(place=self.place.locate(eqn, jaxpr))
      with _equations.get_eqn_ctx_manager(eqn):
        return inside._enter(call, inputs, notes)
    if not eqn.outvars and _SILENT.search(eqn.primitive.name):
      return [], notes
    if has_half:
      return self._beside(eqn, inputs), notes
    return _equations.eqn_as_fun(eqn)(*inputs), notes

  def _product(
    self, eqn: core.JaxprEqn, row: int, inputs: list[Any], notes: Notes
  ) -> Done:
    dtype = self.rows.all[row].dtype

    rounded = functools.partial(_rounded_in_one_way, self.ways[row], dtype)
    product = _equations.eqn_as_fun(_operations.as_highest_float32(eqn))
    (out,) = rounded(product(*rounded(inputs[:2]), *inputs[2:]))
    arrays, limits = [*inputs[:2], out], _numbers.get_dtype_limits(dtype)
    noted = _statistics_with(notes[row], arrays, limits)
    return [out], [*notes[:row], noted, *notes[row + 1 :]]

  def _beside(self, eqn: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """What is in half precision, and no product of `autocast`.

    What `autocast` made is so for the sake of a product, which rounds. All else
    was in half precision before, and computes as it is written.
    """
    if _operations.is_noop_reduce_precision(eqn):
      return inputs  # JAX writes it in front of what a checkpoint saves.
    if is_marked(eqn, self.place):
      is_cast = eqn.primitive.name == "convert_element_type"
      return inputs if is_cast else _equations.eqn_as_fun(eqn)(*inputs)
    pairs: Any = zip(inputs, [v.aval for v in eqn.invars], strict=True)
    args = [x.astype(a.dtype) if self._is_half(a) else x for x, a in pairs]
    return list(map(self._widened, _equations.eqn_as_fun(eqn)(*args)))

  def _enter(
    self, call: _higher_order.HigherOrderOp, inputs: list[Any], notes: Notes
  ) -> Done:
    match call:
      case _higher_order.Scan():
        return self._scan(call, inputs, notes)
      case _higher_order.While():
        return self._while(call, inputs, notes)
      case _higher_order.Cond():
        return self._cond(call, inputs, notes)
      case _higher_order.ShardMap():
        return self._shard_map(call, inputs, notes)
      case _:
        return self.run(call.body, inputs, notes)

  def _scan(
    self, scan: _higher_order.Scan, inputs: list[Any], notes: Notes
  ) -> Done:
    consts, first, slices = scan.split(inputs)

    def step(carry: Any, its_slices: Any) -> tuple[Any, Any]:
      values, notes = carry
      its_inputs = [*consts, *values, *its_slices]
      outs, notes = self.run(scan.body, its_inputs, notes)
      return (outs[: scan.num_carry], notes), outs[scan.num_carry :]

    (last, notes), stacked = lax.scan(
      step, (first, notes), slices, scan.length, scan.reverse
    )
    return [*last, *stacked], notes

  def _while(
    self, loop: _higher_order.While, inputs: list[Any], notes: Notes
  ) -> Done:
    of_condition, of_body, first = loop.split(inputs)

    # A condition returns no notes. So each iteration asks for the next one.
    def condition(values: Any, notes: Notes) -> tuple[Any, Any, Notes]:
      inputs = [*of_condition, *values]
      (goes_on,), notes = self.run(loop.condition, inputs, notes)
      return goes_on, values, notes

    def step(carry: Any) -> tuple[Any, Any, Notes]:
      goes_on, values, notes = carry
      outs, notes = self.run(loop.body, [*of_body, *values], notes)
      if jnp.ndim(goes_on):  # ``vmap`` made many loops of one.
        pairs = zip(outs, values, strict=True)
        outs = [_arrays.select_rows(goes_on, *pair) for pair in pairs]
      return condition(outs, notes)

    goes_on = lambda carry: jnp.any(carry[0])
    start = condition(first, notes)
    return lax.while_loop(goes_on, step, start)[1:]

  def _cond(
    self, cond: _higher_order.Cond, inputs: list[Any], notes: Notes
  ) -> Done:
    index, *operands = inputs
    branches = [functools.partial(self.run, body) for body in cond.branches]
    return lax.switch(index, branches, operands, notes)

  def _shard_map(
    self, mapped: _higher_order.ShardMap, inputs: list[Any], notes: Notes
  ) -> Done:
    # A set has another order in each process, and all must run one program.
    axes = tuple(sorted(mapped.manual_axes, key=str))

    def body(ways: Any, *args: Any) -> Any:
      # What is noted differs among the devices, and so its type must say.
      differs = lambda x: x + 0 * lax.axis_index(axes).astype(jnp.float32)
      empty = jax.tree.map(differs, [no_statistics() for _ in notes])
      program = self._replace(ways=ways)
      outs, noted = program.run(mapped.body, args, empty)
      return outs, [statistics_of_devices(n, axes) for n in noted]

    everywhere = jax.sharding.PartitionSpec()
    in_specs = (everywhere, *mapped.in_specs)
    out_specs = (list(mapped.out_specs), everywhere)
    on_devices = mapped.wrap_fun(body, in_specs, out_specs)
    outs, noted = on_devices(self.ways, *inputs)
    return outs, list(map(statistics_together, notes, noted))


# A program has as many of the next two as products, most of them of few shapes.
# They are compiled functions, so that JAX traces each shape once.
@functools.partial(jax.jit, static_argnums=1)
def _rounded_in_one_way(
  way: Any, dtype: np.dtype, arrays: Sequence[Any]
) -> list[Any]:
  """The operands or results of a product that runs in this way."""
  # A branch keeps XLA from fusing it, again and again, into all that reads.
  rounding = lambda xs: [_rounded(x, dtype) for x in xs]
  moving = lambda xs: list(map(_a_little_off, xs))
  return lax.switch(way, [list, rounding, moving], arrays)


@functools.partial(jax.jit, static_argnums=2)
def _statistics_with(
  noted: Statistics, arrays: Sequence[Any], limits: _numbers.DtypeLimits
) -> Statistics:
  """What was noted before, and of one more run."""
  return statistics_together(noted, statistics_of_run(arrays, limits))


def _rounded(x: Any, dtype: np.dtype) -> Any:
  """The array rounded to a dtype. XLA may drop a pair of conversions."""
  info: Any = jnp.finfo(dtype)
  rounded = lax.reduce_precision(x, info.nexp, info.nmant)
  normal, step = float(info.smallest_normal), float(info.smallest_subnormal)
  if normal == jnp.finfo(jnp.float32).smallest_normal:
    return rounded
  # What is subnormal is flushed to zero there.
  subnormal = lax.round(x * (1 / step), _TO_EVEN) * step
  return jnp.where(jnp.abs(x) < normal, subnormal, rounded)


def _a_little_off(x: Any) -> Any:
  """The array with other last bits: the same ones wherever it is read."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ _FOURTH_LAST_BIT
  moved = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where((x == 0) | ~jnp.isfinite(x), x, moved)


class Rows:
  """The products of a program, by where they stand.

  They are known by the mark of `autocast`, which goes wherever an equation
  goes. So nothing is decided here that was decided there.

  Attributes:
    all: all of them, in the order of the program.
    names: for each, the shortest name that tells its place from all others.
    sources: for each, the line that tells it from others of a like name.
    dtypes: their half precisions: mostly one.
    not_entered: the names of what holds products and cannot be entered.
    higher_order_of: what an equation calls, repeats or chooses; None if it is
      not known.
    are_in: whether there are marks in the jaxprs that an equation holds.
  """

  def __init__(self, closed: _equations.ClosedJaxpr) -> None:
    alone = functools.partial(is_marked, around=_places.EqnLocation())
    self.are_in = _walk.EqnSearch(alone, _equations.subjaxprs).any_inside
    self.higher_order_of = functools.cache(_higher_order.parse_higher_order)
    self.not_entered: list[str] = []
    self._numbers: dict[Row, int] = {}
    for step in _walk.walk(closed, self._inside, only_live=True):
      around = step.parent.location if step.parent else _places.EqnLocation()
      if is_product(step.eqn, around):
        self._numbers.setdefault(
          _row(step.eqn, step.location), len(self._numbers)
        )
      elif self.are_in(step.eqn) and self.higher_order_of(step.eqn) is None:
        name = _lines.get_op_name(step.eqn)
        self.not_entered.append(
          _places.format_location(name, step.location.label)
        )
    self.all = list(self._numbers)
    told = _places.make_unique_labels([(x.names, x.backward) for x in self.all])
    self.names = [name for name, _ in told]
    self.sources = [source for _, source in told]
    self.dtypes = {row.dtype for row in self.all}

  def number(
    self, eqn: core.JaxprEqn, place: _places.EqnLocation
  ) -> int | None:
    """The row of a product at this place; None if nothing reads its result."""
    return self._numbers.get(_row(eqn, place))

  def by_name(self) -> list[list[int]]:
    """The numbers of the rows of each place."""
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(self.names):
      numbers.setdefault(name, []).append(i)
    return list(numbers.values())

  def _inside(self, eqn: core.JaxprEqn) -> list[_equations.ClosedJaxpr]:
    call = self.higher_order_of(eqn) if self.are_in(eqn) else None
    return _higher_order.get_bodies(call) if call else []


def is_product(eqn: core.JaxprEqn, around: _places.EqnLocation) -> bool:
  """Whether this is a product that `autocast` runs in half precision."""
  return _operations.is_matmul(eqn) and is_marked(eqn, around)


def is_marked(eqn: core.JaxprEqn, around: _places.EqnLocation) -> bool:
  """Whether `autocast` made this equation, or what is around it."""
  return around.push_scope(eqn).autocast_dtype is not None


def _row(eqn: core.JaxprEqn, place: _places.EqnLocation) -> Row:
  name = _lines.get_op_name(eqn)
  return Row(name, place.names, place.is_backward, place.autocast_dtype)


def no_statistics() -> Statistics:
  """What is known of a product that has not run."""
  one, three = jnp.zeros((), jnp.float32), jnp.zeros(3, jnp.float32)
  return Statistics(one, one, three, three, three)


def statistics_of_run(
  arrays: Sequence[Any], limits: _numbers.DtypeLimits
) -> Statistics:
  """What is noted of one run of a product.

  Args:
    arrays: the two operands and the result.
    limits: what half precision can hold.

  Returns:
    A :class:`Statistics`.
  """
  largest, lost, subnormal = map(
    jnp.stack, zip(*(_sizes(x, limits) for x in arrays), strict=True)
  )
  entries = jnp.array([x.size for x in arrays], jnp.float32)
  return Statistics(jnp.float32(1), jnp.max(largest), entries, lost, subnormal)


def _sizes(x: Any, limits: _numbers.DtypeLimits) -> Any:
  """The largest magnitude, and how many entries are lost and subnormal."""
  x = jnp.abs(x)
  known = jnp.where(jnp.isnan(x), 0, x)
  lost = ((x > 0) & (x <= limits.underflow_threshold)).astype(jnp.int32)
  small = (
    (x > limits.underflow_threshold) & (x < limits.smallest_normal)
  ).astype(jnp.int32)

  # One pass for all three: XLA compiles a loop for each reduction.
  def both(one: Any, other: Any) -> Any:
    (a, b, c), (d, e, f) = one, other
    return lax.max(a, d), b + e, c + f

  zeros = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  axes = tuple(range(x.ndim))
  largest, *counts = lax.reduce((known, lost, small), zeros, both, axes)
  return largest, *(count.astype(jnp.float32) for count in counts)


def statistics_together(one: Statistics, other: Statistics) -> Statistics:
  """What was noted of some runs and of others."""
  return Statistics(
    times=one.times + other.times,
    largest=jnp.maximum(one.largest, other.largest),
    entries=one.entries + other.entries,
    lost=one.lost + other.lost,
    subnormal=one.subnormal + other.subnormal,
  )


def statistics_of_devices(one: Statistics, axes: tuple[Any, ...]) -> Statistics:
  """What was noted on all devices along the axes of a mesh."""
  added = jax.tree.map(lambda x: lax.psum(x, axes), one)
  return added._replace(largest=lax.pmax(one.largest, axes))
