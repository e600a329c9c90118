"""Run single eqns and jaxprs, outside or inside a ``shard_map``.

The interpreter calls the same methods in both cases. Outside, :class:`Runner`
evaluates eqns on plain arrays. Inside, :class:`ShardRunner` stores the values
of all devices in one array with an additional first axis, and wraps each eqn in
a ``shard_map``.
"""

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
  """Runs eqns and jaxprs on plain arrays.

  Attributes:
    axis: the axis of an array that is the first axis within the jaxpr.
  """

  axis = 0

  def make_eqn_fun(self, eqn: core.JaxprEqn) -> RunFn:
    """Return a function that evaluates an eqn."""
    # The interpreter may run the eqn again on the same operands, so a jit in it
    # must not donate their buffers.
    fun = _eqns.eqn_as_fun(_interpret.disable_donation(eqn))
    as_array = _interpret.as_array
    return lambda *arrays: list(map(as_array, fun(*arrays), eqn.outvars))

  def compile_jaxpr(self, closed_jaxpr: _eqns.ClosedJaxpr) -> RunFn:
    """Return a jitted function that evaluates a jaxpr."""
    return jax.jit(core.jaxpr_as_fun(closed_jaxpr))

  def make_loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.StoppableLoop:
    """Return a loop that can stop, compiled once where possible."""
    if any(map(_has_mesh, [*eqn.invars, *eqn.outvars])):
      return self.make_single_iteration_loop(eqn, loop)
    if isinstance(loop, _higher_order.Scan):
      return _loops.CompiledScan(loop)
    return _loops.CompiledWhile(loop)

  def make_single_iteration_loop(
    self, eqn: core.JaxprEqn, loop: _loops.AnyLoop
  ) -> _loops.SingleIterationLoop:
    """Return a loop that stops after each iteration."""
    run_all, run_body = self.make_eqn_fun(eqn), self.compile_jaxpr(loop.body)
    return _loops.SingleIterationLoop(loop, run_all, run_body, self.take_slice)

  def take_slice(self, array: jax.Array, i: int) -> jax.Array:
    """Return the slice that an iteration of a loop reads."""
    return take_slice(array, i, self.axis)

  def lift_const(self, array: Any, atom: Any) -> Any:
    """Convert a literal or a constant of a jaxpr to an array of this runner."""
    return _interpret.as_array(array, atom)


class ShardRunner(Runner):
  """Runs eqns and jaxprs from the body of a ``shard_map``.

  An array has an additional first axis, which is sharded over the mesh axes
  that the value varies over: an entry for each device along them, or a single
  entry if the value is the same on all devices. Each eqn runs in a separate
  ``shard_map`` that removes this axis, so the eqn has the types that it was
  traced with.
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
    # A literal that varies over mesh axes has an equal entry for each device.
    shards = np.broadcast_to(jax.device_get(array), (num_shards, *array.shape))
    return jax.device_put(shards, sharding)

  def shard_input(self, i: int, array: jax.Array) -> jax.Array:
    """Convert an argument of the ``shard_map`` to an array of this runner."""
    shard_map = self._shard_map
    spec = self._get_spec(shard_map.body.jaxpr.invars[i])
    return self._jit_shard_map(
      lambda x: x[None], (shard_map.in_specs[i],), spec
    )(array)

  def gather_output(self, i: int, array: jax.Array) -> jax.Array:
    """Convert an array of this runner to an output of the ``shard_map``."""
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
    """Return the spec that shards the first axis over the varying mesh axes."""
    return PartitionSpec(self._shard_map.list_varying_axes(var.aval))


def _has_mesh(atom: Any) -> bool:
  """Return whether the type of an array includes an explicit sharding."""
  sharding = getattr(atom.aval, "sharding", None)
  return sharding is not None and not sharding.mesh.empty


@functools.partial(jax.jit, static_argnums=2)
def take_slice(array: jax.Array, i: int, axis: int) -> jax.Array:
  """Return one entry along an axis."""
  return jax.lax.dynamic_index_in_dim(array, i, axis, keepdims=False)


# Jitted, since the interpreter calls it on concrete arrays.
select_rows = jax.jit(_arrays.select_rows)


def stack_in_chunks(arrays: list[jax.Array], axis: int) -> jax.Array:
  """Stack arrays along a new axis, a hundred at a time.

  XLA compiles a concatenation of thousands of operands slowly.
  """
  rows = [jnp.expand_dims(array, axis) for array in arrays]
  # Concatenate chunks until one is left: a tree with a fan-in of 100.
  while len(rows) > 1:
    chunks = [rows[i : i + 100] for i in range(0, len(rows), 100)]
    rows = [jnp.concatenate(chunk, axis) for chunk in chunks]
  return rows[0]
