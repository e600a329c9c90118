"""Reductions over mapped axes (``pmap``, ``shard_map``, ``vmap``)."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _primitives

AxisName = Hashable | Sequence[Hashable]


def all_reduce_and(finite: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Return whether a flag is true on every device along the axes."""
  axes = _get_varying_axes(finite, axis_name)
  if not axes:
    return finite
  # A float32 maximum, like `max_over_axes`, so XLA can combine the two
  # all-reduces into one.
  return lax.pmax(1 - finite.astype(jnp.float32), axes) < 1


def max_over_axes(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Return the largest value of a scalar along the axes."""
  # JAX has no derivative of pmax, so without stop_gradient a training step
  # could not be differentiated. The derivative is not needed: the loss scale is
  # not trained.
  x = lax.stop_gradient(x)
  axes = _get_varying_axes(x, axis_name)
  return lax.pmax(x, axes) if axes else x


def sum_over_axes(
  values: Sequence[jax.Array], axis_name: AxisName | None
) -> jax.Array:
  """Sum scalars over mapped axes, counting replicated values once.

  Args:
    values: scalars, each sharded or replicated along each axis.
    axis_name: the axes, or None.

  Returns:
    A float32[] that is the same on all devices along the axes. Values that vary
    over an axis (shards) are summed over it, and values that don't vary
    (replicas) are counted once.

  Raises:
    ValueError: if JAX doesn't track which values vary over an axis.
  """
  names = _as_tuple(axis_name)
  for name in names:
    if not _is_vma_tracked(name):
      raise ValueError(_format_vma_required(name))
  axes = tuple(
    n
    for n in names
    if any(n in _primitives.get_varying_axes(x) for x in values)
  )
  terms = []
  for value in values:
    # Zero the replicas on all devices except the first, so a single psum serves
    # both sharded and replicated values.
    for name in axes:
      if name not in _primitives.get_varying_axes(value):
        value = _zero_except_first(value, name)
    terms.append(value)
  result = _arrays.fold_by_platform(lax.add, terms, jnp.float32(0))
  return lax.psum(result, axes) if axes else result


def _zero_except_first(x: jax.Array, axis_name: Hashable) -> jax.Array:
  """Return x on the first device along an axis, and 0 on the others."""
  return jnp.where(lax.axis_index(axis_name) == 0, x, jnp.float32(0))


def _get_varying_axes(
  x: Any, axis_name: AxisName | None
) -> tuple[Hashable, ...]:
  """Return the axes along which x may differ between devices."""
  return tuple(
    name
    for name in _as_tuple(axis_name)
    if not _is_vma_tracked(name) or name in _primitives.get_varying_axes(x)
  )


def _is_vma_tracked(axis_name: Hashable) -> bool:
  """Return whether the types of values show if they vary over an axis.

  JAX tracks varying manual axes (vma) under ``shard_map`` with
  ``check_vma=True``, but not with ``check_vma=False``, ``pmap`` or ``vmap``.
  The index along the axis always varies, so if its type doesn't show that, the
  axis isn't tracked.
  """
  try:
    index = lax.axis_index(axis_name)
  except NameError as error:
    raise NameError(
      "axis_name must be an axis of the pmap, shard_map or vmap that calls"
      f" update, got axis_name = {axis_name!r}, which is no axis there. Pass"
      " the axis_name of pmap or vmap, or an axis of the mesh of shard_map."
      " Under jit without one of them, leave out axis_name."
    ) from error
  return axis_name in _primitives.get_varying_axes(index)


def _as_tuple(axis_name: AxisName | None) -> tuple[Hashable, ...]:
  if axis_name is None:
    return ()
  if isinstance(axis_name, (tuple, list)):
    return tuple(axis_name)
  return (axis_name,)


def _format_vma_required(axis_name: Hashable) -> str:
  return (
    "max_norm needs shard_map with check_vma=True to distinguish sharded from"
    f" replicated gradients, got axis {axis_name!r} of pmap, vmap or"
    " shard_map with"
    " check_vma=False. If all gradients are already averaged over the devices,"
    " leave out max_norm and clip on each device:"
    " with_loss_scaling(optax.chain(optax.clip_by_global_norm(...), inner))."
  )
