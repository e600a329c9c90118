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
from optax_lossscale._jaxprs import _eqns, _higher_order, _interpret
from optax_lossscale.diagnostics._overflow import _loops

RunFn = Callable[..., list[Any]]


class Runner:
  """Runs equations and jaxprs on arrays as they are.

  Attributes:
    axis: the axis of an array that is the first axis within the jaxpr.
  """

  axis = 0

  def make_eqn_fun(self, eqn: core.JaxprEqn) -> RunFn:
    """What carries out an equation."""
    fun = _eqns.eqn_as_fun(_interpret.disable_donation(eqn))
    as_array = _interpret.as_array
    return lambda *arrays: list(map(as_array, fun(*arrays), eqn.outvars))

  def compile_jaxpr(self, closed_jaxpr: _eqns.ClosedJaxpr) -> RunFn:
    """What runs a whole jaxpr at once."""
    return jax.jit(core.jaxpr_as_fun(closed_jaxpr))

  def make_loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.StoppableLoop:
    """What runs a loop, as a whole or in parts."""
    if any(map(_has_mesh, [*eqn.invars, *eqn.outvars])):
      return self.make_single_iteration_loop(eqn, loop)
    if isinstance(loop, _higher_order.Scan):
      return _loops.CompiledScan(loop)
    return _loops.CompiledWhile(loop)

  def make_single_iteration_loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.SingleIterationLoop:
    """What runs one iteration of a loop after the other."""
    run_all, run_body = self.make_eqn_fun(eqn), self.compile_jaxpr(loop.body)
    return _loops.SingleIterationLoop(loop, run_all, run_body, self.take_slice)

  def take_slice(self, array: jax.Array, i: int) -> jax.Array:
    """A slice of what a loop slices."""
    return take_slice(array, i, self.axis)

  def lift_const(self, array: Any, atom: Any) -> Any:
    """A number or an array that is written in the jaxpr, as it is kept here."""
    return _interpret.as_array(array, atom)


class ShardRunner(Runner):
  """Runs equations and jaxprs from within a ``shard_map``.

  What differs between devices is kept as one array, in which a further axis
  comes first: an entry for each device. So each can run in a ``shard_map`` of
  its own, with the types that it was traced with.
  """

  axis = 1

  def __init__(self, shard_map: _higher_order.ShardMap):
    self._shard_map = shard_map

  def make_eqn_fun(self, eqn: core.JaxprEqn) -> RunFn:
    return self._map_over_shards(
      super().make_eqn_fun(eqn), eqn.invars, eqn.outvars
    )

  def compile_jaxpr(self, closed_jaxpr: _eqns.ClosedJaxpr) -> RunFn:
    run, jaxpr = core.jaxpr_as_fun(closed_jaxpr), closed_jaxpr.jaxpr
    return self._map_over_shards(run, jaxpr.invars, jaxpr.outvars)

  def make_loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.StoppableLoop:
    return self.make_single_iteration_loop(eqn, loop)

  def lift_const(self, array: Any, atom: Any) -> Any:
    array = super().lift_const(array, atom)
    mesh = self._shard_map.mesh
    axis_sizes = dict(mesh.shape)
    varying_axes = self._shard_map.list_varying_axes(atom.aval)
    num_shards = math.prod(axis_sizes[name] for name in varying_axes)
    sharding = jax.sharding.NamedSharding(mesh, self._get_spec(atom))
    shards = np.broadcast_to(jax.device_get(array), (num_shards, *array.shape))
    return jax.device_put(shards, sharding)

  def shard_input(self, i: int, array: jax.Array) -> jax.Array:
    """An argument of the ``shard_map``, as it is kept here."""
    shard_map = self._shard_map
    spec = self._get_spec(shard_map.body.jaxpr.invars[i])
    return self._jit_shard_map(
      lambda x: x[None], (shard_map.in_specs[i],), spec
    )(array)

  def gather_output(self, i: int, array: jax.Array) -> jax.Array:
    """What the ``shard_map`` returns of what is kept here."""
    shard_map = self._shard_map
    spec = self._get_spec(shard_map.body.jaxpr.outvars[i])
    return self._jit_shard_map(lambda x: x[0], (spec,), shard_map.out_specs[i])(
      array
    )

  def _map_over_shards(
    self,
    run: RunFn,
    invars: Sequence[_eqns.Atom],
    outvars: Sequence[_eqns.Atom],
  ) -> RunFn:
    def fun(*shards: Any) -> list[Any]:
      return [x[None] for x in run(*(shard[0] for shard in shards))]

    specs = (
      tuple(map(self._get_spec, invars)),
      list(map(self._get_spec, outvars)),
    )
    return self._jit_shard_map(fun, *specs)

  def _jit_shard_map(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Any:
    return jax.jit(self._shard_map.wrap_fun(fun, in_specs, out_specs))

  def _get_spec(self, var: _eqns.Atom) -> PartitionSpec:
    """How the first axis is spread: an entry on each device, or on all."""
    return PartitionSpec(self._shard_map.list_varying_axes(var.aval))


def _has_mesh(atom: Any) -> bool:
  """Whether its type says how an array is sharded."""
  sharding = getattr(atom.aval, "sharding", None)
  return sharding is not None and not sharding.mesh.empty


@functools.partial(jax.jit, static_argnums=2)
def take_slice(array: jax.Array, i: int, axis: int) -> jax.Array:
  """One entry along an axis."""
  return jax.lax.dynamic_index_in_dim(array, i, axis, keepdims=False)


# Compiled, since these arrays are no longer traced.
select_rows = jax.jit(_arrays.select_rows)


def stack_in_chunks(arrays: list[jax.Array], axis: int) -> jax.Array:
  """Many arrays along a new axis, a few at a time."""
  rows = [jnp.expand_dims(array, axis) for array in arrays]
  while len(rows) > 1:
    chunks = [rows[i : i + 100] for i in range(0, len(rows), 100)]
    rows = [jnp.concatenate(chunk, axis) for chunk in chunks]
  return rows[0]
