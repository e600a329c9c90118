"""What the devices along mapped axes decide and measure together."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale._jaxprs import _avals

AxisName = Hashable | Sequence[Hashable]


def all_reduce_and(finite: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Whether the flag is true on every device along the axes."""
  axes = _get_varying_axes(finite, axis_name)
  if not axes:
    return finite
  # A maximum in float32, as `maximum` is: XLA can merge the two.
  return lax.pmax(1 - finite.astype(jnp.float32), axes) < 1


def max_over_axes(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """The largest value of a scalar along the axes."""
  # A maximum over devices has no derivative in JAX. All policies are given this
  # one, and no policy needs a derivative of it: the scale is not trained.
  x = lax.stop_gradient(x)
  axes = _get_varying_axes(x, axis_name)
  return lax.pmax(x, axes) if axes else x


def sum_over_axes(
  values: Sequence[jax.Array], axis_name: AxisName | None
) -> jax.Array:
  """The sum of what devices hold parts of; float32[].

  Args:
    values: scalars of what is sharded or replicated along each of the axes.
    axis_name: the axes, or None.

  Returns:
    The sum of the whole, which is the same on all devices along the axes. What
    varies over an axis is a part of the whole, and is summed over the axis.
    What does not vary is counted once.

  Raises:
    ValueError: if it cannot be known which of them are parts.
  """
  names = _as_tuple(axis_name)
  for name in names:
    if not _is_vma_tracked(name):
      raise ValueError(_format_vma_required(name))
  axes = tuple(
    n for n in names if any(n in _avals.get_varying_axes(x) for x in values)
  )
  result = jnp.float32(0)
  for value in values:
    # One sum over the devices is enough for sharded and replicated parts.
    for name in axes:
      if name not in _avals.get_varying_axes(value):
        value = _zero_except_first(value, name)
    result += value
  return lax.psum(result, axes) if axes else result


def _zero_except_first(x: jax.Array, axis_name: Hashable) -> jax.Array:
  """What all devices along an axis have, and 0 on all but the first one."""
  return jnp.where(lax.axis_index(axis_name) == 0, x, jnp.float32(0))


def _get_varying_axes(
  x: Any, axis_name: AxisName | None
) -> tuple[Hashable, ...]:
  """Those of the axes along which devices may hold different values of x."""
  return tuple(
    name
    for name in _as_tuple(axis_name)
    if not _is_vma_tracked(name) or name in _avals.get_varying_axes(x)
  )


def _is_vma_tracked(axis_name: Hashable) -> bool:
  """Whether types tell what varies over this axis.

  They do under ``shard_map`` with ``check_vma=True``. They do not with
  ``check_vma=False``, under ``pmap`` and under ``vmap``. The index along the
  axis always varies, so that its type tells which of the two it is.
  """
  return axis_name in _avals.get_varying_axes(lax.axis_index(axis_name))


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
