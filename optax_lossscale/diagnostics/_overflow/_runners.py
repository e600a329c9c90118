"""How equations are run: as they are, or on the devices of a shard_map."""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _equations, _higher_order, _interpret
from optax_lossscale.diagnostics._overflow import _loops

Run = Callable[..., list[Any]]


class Runner:
  """Runs equations and jaxprs on arrays as they are.

  Attributes:
    axis: the axis of an array that is the first axis within the jaxpr.
  """

  axis = 0

  def equation(self, eqn: core.JaxprEqn) -> Run:
    """What carries out an equation."""
    fun = _equations.eqn_as_fun(_interpret.disable_donation(eqn))
    as_array = _interpret.as_array
    return lambda *arrays: list(map(as_array, fun(*arrays), eqn.outvars))

  def whole(self, closed: _equations.ClosedJaxpr) -> Run:
    """What runs a whole jaxpr at once."""
    return jax.jit(core.jaxpr_as_fun(closed))

  def loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.StoppableLoop:
    """What runs a loop, as a whole or in parts."""
    if any(map(_has_mesh, [*eqn.invars, *eqn.outvars])):
      return self.one_by_one(eqn, loop)
    if isinstance(loop, _higher_order.Scan):
      return _loops.CompiledScan(loop)
    return _loops.CompiledWhile(loop)

  def one_by_one(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.SingleIterationLoop:
    """What runs one iteration of a loop after the other."""
    whole, body = self.equation(eqn), self.whole(loop.body)
    return _loops.SingleIterationLoop(loop, whole, body, self.take)

  def take(self, array: jax.Array, i: int) -> jax.Array:
    """A slice of what a loop slices."""
    return take(array, i, self.axis)

  def lift(self, array: Any, atom: Any) -> Any:
    """A number or an array that is written in the jaxpr, as it is kept here."""
    return _interpret.as_array(array, atom)


class ShardRunner(Runner):
  """Runs equations and jaxprs from within a ``shard_map``.

  What differs between devices is kept as one array, in which a further axis
  comes first: an entry for each device. So each can run in a ``shard_map`` of
  its own, with the types that it was traced with.
  """

  axis = 1

  def __init__(self, mapped: _higher_order.ShardMap):
    self._mapped = mapped

  def equation(self, eqn: core.JaxprEqn) -> Run:
    return self._on_shards(super().equation(eqn), eqn.invars, eqn.outvars)

  def whole(self, closed: _equations.ClosedJaxpr) -> Run:
    run, jaxpr = core.jaxpr_as_fun(closed), closed.jaxpr
    return self._on_shards(run, jaxpr.invars, jaxpr.outvars)

  def loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.StoppableLoop:
    return self.one_by_one(eqn, loop)

  def lift(self, array: Any, atom: Any) -> Any:
    array = super().lift(array, atom)
    mesh = self._mapped.mesh
    sizes = dict(mesh.shape)
    over = self._mapped.list_varying_axes(atom.aval)
    count = math.prod(sizes[name] for name in over)
    placed = jax.sharding.NamedSharding(mesh, self._spec(atom))
    many = np.broadcast_to(jax.device_get(array), (count, *array.shape))
    return jax.device_put(many, placed)

  def enter(self, i: int, array: jax.Array) -> jax.Array:
    """An argument of the ``shard_map``, as it is kept here."""
    mapped = self._mapped
    spec = self._spec(mapped.body.jaxpr.invars[i])
    return self._map(lambda x: x[None], (mapped.in_specs[i],), spec)(array)

  def leave(self, i: int, array: jax.Array) -> jax.Array:
    """What the ``shard_map`` returns of what is kept here."""
    mapped = self._mapped
    spec = self._spec(mapped.body.jaxpr.outvars[i])
    return self._map(lambda x: x[0], (spec,), mapped.out_specs[i])(array)

  def _on_shards(
    self,
    run: Run,
    inputs: Sequence[_equations.Atom],
    outputs: Sequence[_equations.Atom],
  ) -> Run:
    def fun(*shards: Any) -> list[Any]:
      return [x[None] for x in run(*(shard[0] for shard in shards))]

    specs = tuple(map(self._spec, inputs)), list(map(self._spec, outputs))
    return self._map(fun, *specs)

  def _map(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    return jax.jit(self._mapped.wrap_fun(fun, in_specs, out_specs))

  def _spec(self, var: _equations.Atom) -> PartitionSpec:
    """How the first axis is spread: an entry on each device, or on all."""
    return PartitionSpec(self._mapped.list_varying_axes(var.aval))


def _has_mesh(atom: Any) -> bool:
  """Whether its type says how an array is sharded."""
  sharding = getattr(atom.aval, "sharding", None)
  return sharding is not None and not sharding.mesh.empty


@functools.partial(jax.jit, static_argnums=2)
def take(array: jax.Array, i: int, axis: int) -> jax.Array:
  """One entry along an axis."""
  return jax.lax.dynamic_index_in_dim(array, i, axis, keepdims=False)


# Compiled, since these arrays are no longer traced.
select = jax.jit(_arrays.select_rows)


def stack(arrays: list[jax.Array], axis: int) -> jax.Array:
  """Many arrays along a new axis, a few at a time."""
  rows = [jnp.expand_dims(array, axis) for array in arrays]
  while len(rows) > 1:
    parts = [rows[i : i + 100] for i in range(0, len(rows), 100)]
    rows = [jnp.concatenate(part, axis) for part in parts]
  return rows[0]
