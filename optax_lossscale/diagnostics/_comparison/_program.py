"""Runs a program with each of its products in float32 or in half precision.

The program is traced once more, operation by operation: a product becomes a
choice between both precisions, by a flag that is given when the program runs.
So one compiled program serves all runs. A loop, a branch and a ``shard_map``
are made anew, and carry along what is noted of the products inside.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics import _limits
from optax_lossscale.diagnostics._comparison import _rows, _statistics

_HIGHEST = lax.Precision.HIGHEST


class Program:
  """A program with a choice for each product, to be called while it is traced.

  Attributes:
    rows: the products.
    dtype: the dtype of half precision.
    in_half: for each row, whether it runs in half precision; bool[rows].
    noting: whether to note what there is to tell of the products.
    notes: for each row, what was noted; nothing, if that is not asked for.
  """

  def __init__(
    self, rows: _rows.Rows, dtype: Any, in_half: Any, *, noting: bool
  ) -> None:
    self.rows = rows
    self.dtype = jnp.dtype(dtype)
    self.in_half = in_half
    self.noting = noting
    self.notes = self._empty_notes()
    self._limits = _limits.limits_of(self.dtype)
    self._seed: Any = jnp.uint32(0)

  def _empty_notes(self) -> list[_statistics.Statistics]:
    return [_statistics.empty() for _ in self.rows.all if self.noting]

  def jaxpr(
    self,
    closed: _jaxprs.ClosedJaxpr,
    inputs: Sequence[Any],
    place: _jaxprs.Place,
  ) -> list[Any]:
    """What a jaxpr that is called at this place returns."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update(zip(jaxpr.constvars, closed.consts, strict=True))
    read = lambda x: x.val if isinstance(x, core.Literal) else env[x]
    for eqn, last_read in _jaxprs.needed_equations(jaxpr):
      outs = self._equation(eqn, jaxpr, place, list(map(read, eqn.invars)))
      env.update(zip(eqn.outvars, outs, strict=True))
      for var in last_read:
        env.pop(var, None)
    return list(map(read, jaxpr.outvars))

  def _equation(
    self,
    eqn: core.JaxprEqn,
    jaxpr: core.Jaxpr,
    place: _jaxprs.Place,
    inputs: list[Any],
  ) -> Sequence[Any]:
    row = self.rows.number(eqn, jaxpr, place)
    if row is not None:
      return [self._product(eqn, row, inputs)]
    if not self.rows.are_in(eqn):
      is_silent = not eqn.outvars and "callback" in eqn.primitive.name
      return [] if is_silent else _jaxprs.function(eqn)(*inputs)
    with _jaxprs.context_of(eqn):
      return self._inside(eqn, place.at(eqn, jaxpr), inputs)

  def _product(self, eqn: core.JaxprEqn, row: int, inputs: list[Any]) -> Any:
    out = lax.cond(
      self.in_half[row],
      lambda *args: self._narrow(eqn, args),
      lambda *args: _exact(eqn, args),
      *inputs,
    )
    if self.noting:
      arrays = [*inputs[:2], out]
      self.notes[row] = _statistics.noted(
        self.notes[row], arrays, self._limits, self._seed
      )
    return out

  def _narrow(self, eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Any:
    """A product as autocast runs it. XLA is kept from dropping a rounding."""
    narrowed = [
      lax.optimization_barrier(x.astype(self.dtype)) if i < 2 else x
      for i, x in enumerate(inputs)
    ]
    (var,) = eqn.outvars
    aval: Any = var.aval
    half = eqn.replace(
      outvars=[core.Var(aval.update(dtype=self.dtype, weak_type=False))],
      params={**eqn.params, "preferred_element_type": self.dtype},
    )
    (out,) = _jaxprs.function(half)(*narrowed)
    return lax.optimization_barrier(out).astype(jnp.float32)

  def _inside(
    self, eqn: core.JaxprEqn, place: _jaxprs.Place, inputs: list[Any]
  ) -> Sequence[Any]:
    match _rows.part_of(eqn):
      case None:
        return _jaxprs.function(eqn)(*inputs)
      case _jaxprs.Scan() as scan:
        return self._scan(scan, place, inputs)
      case _jaxprs.While() as loop:
        return self._while(loop, place, inputs)
      case _jaxprs.Cond() as cond:
        return self._cond(cond, place, inputs)
      case _jaxprs.ShardMap() as mapped:
        return self._shard_map(mapped, place, inputs)
      case called:
        return self.jaxpr(called, inputs, place)

  def _scan(
    self, scan: _jaxprs.Scan, place: _jaxprs.Place, inputs: list[Any]
  ) -> Sequence[Any]:
    n = scan.consts + scan.carry
    consts, first, slices = (
      inputs[: scan.consts],
      inputs[scan.consts : n],
      inputs[n:],
    )

    def step(carry: Any, its_slices: Any) -> tuple[Any, Any]:
      notes, values = carry
      self.notes = list(notes)
      outs = self.jaxpr(scan.body, [*consts, *values, *its_slices], place)
      return (self.notes, outs[: scan.carry]), outs[scan.carry :]

    (self.notes, last), stacked = lax.scan(
      step, (self.notes, first), slices, scan.length, scan.reverse
    )
    return [*last, *stacked]

  def _while(
    self, loop: _jaxprs.While, place: _jaxprs.Place, inputs: list[Any]
  ) -> Sequence[Any]:
    first = loop.condition_consts
    second = first + loop.body_consts
    cond_consts, body_consts = inputs[:first], inputs[first:second]

    def flags(values: list[Any]) -> Any:
      # A condition cannot carry notes.
      noting, self.noting = self.noting, False
      (out,) = self.jaxpr(loop.condition, [*cond_consts, *values], place)
      self.noting = noting
      return out

    def step(carry: Any) -> Any:
      notes, values = carry
      self.notes = list(notes)
      outs = self.jaxpr(loop.body, [*body_consts, *values], place)
      goes_on = flags(values)
      if jnp.ndim(goes_on):  # ``vmap`` made many loops of one.
        outs = [
          _where(goes_on, *pair) for pair in zip(outs, values, strict=True)
        ]
      return self.notes, outs

    goes_on = lambda carry: jnp.any(flags(carry[1]))
    self.notes, outs = lax.while_loop(
      goes_on, step, (self.notes, inputs[second:])
    )
    return outs

  def _cond(
    self, cond: _jaxprs.Cond, place: _jaxprs.Place, inputs: list[Any]
  ) -> Sequence[Any]:
    def branch(closed: _jaxprs.ClosedJaxpr) -> Any:
      def call(notes: Any, *operands: Any) -> Any:
        self.notes = list(notes)
        outs = self.jaxpr(closed, operands, place)
        return self.notes, outs

      return call

    index, *operands = inputs
    branches = list(map(branch, cond.branches))
    self.notes, outs = lax.switch(index, branches, self.notes, *operands)
    return outs

  def _shard_map(
    self, mapped: _jaxprs.ShardMap, place: _jaxprs.Place, inputs: list[Any]
  ) -> Sequence[Any]:
    axes = tuple(mapped.manual_axes)
    outside = self.in_half, self.notes, self._seed

    def body(in_half: Any, *args: Any) -> Any:
      index: Any = sum(lax.axis_index(a) * 31**i for i, a in enumerate(axes))
      self.in_half, self._seed = in_half, index.astype(jnp.uint32)
      # What is noted differs among the devices, and so its type must say.
      self.notes = jax.tree.map(
        lambda x: x + 0 * self._seed.astype(jnp.float32),
        self._empty_notes(),
      )
      outs = self.jaxpr(mapped.body, args, place)
      return [_statistics.of_all_devices(n, axes) for n in self.notes], outs

    everywhere = PartitionSpec()
    notes, outs = jax.shard_map(
      body,
      mesh=mapped.mesh,
      in_specs=(everywhere, *mapped.in_specs),
      out_specs=(everywhere, list(mapped.out_specs)),
      axis_names=mapped.manual_axes,
      check_vma=mapped.check_vma,
    )(self.in_half, *inputs)
    self.in_half, before, self._seed = outside
    self.notes = [
      _statistics.together(*pair) for pair in zip(before, notes, strict=True)
    ]
    return outs


def _exact(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> Any:
  """A product in float32, which TPUs and some GPUs take for a wish."""
  params = {**eqn.params, "precision": (_HIGHEST, _HIGHEST)}
  (out,) = _jaxprs.function(eqn.replace(params=params))(*inputs)
  return out


def _where(flags: Any, new: Any, old: Any) -> Any:
  axes = range(jnp.ndim(flags), jnp.ndim(new))
  return jnp.where(jnp.expand_dims(flags, tuple(axes)), new, old)
