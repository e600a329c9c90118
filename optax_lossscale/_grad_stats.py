"""Gradient statistics of a step: finiteness, amax and global norm."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _axes, _grads


class GradStats(NamedTuple):
  """Statistics of the gradients of one step, reduced over all devices.

  Attributes:
    finite: whether the unscaled gradients are finite on every device and the
      caller reports no overflow; bool[].
    amax: the largest magnitude of an unscaled gradient, or the ``grads_amax``
      of the caller if that is larger; float32[], or None if it isn't needed.
    loss_scale: the loss scale of the incoming gradients; float32[], or None if
      they are already unscaled.
    clip_factor: the factor that clips the unscaled gradients to ``max_norm``;
      float32[], or None if nothing is clipped.
    multiplier: the factor that both unscales and clips the incoming gradients;
      float32[], or None if neither is needed.
  """

  finite: jax.Array
  amax: jax.Array | None
  loss_scale: jax.Array | None
  clip_factor: jax.Array | None
  multiplier: jax.Array | None


def measure_grads(
  grads: list[Any],
  *,
  grads_finite: Any,
  grads_amax: Any,
  needs_amax: bool,
  loss_scale: jax.Array | None,
  max_norm: jax.typing.ArrayLike | None,
  axis_name: _axes.AxisName | None,
) -> GradStats:
  """Compute the statistics of scaled or unscaled gradients in one pass.

  Args:
    grads: the gradients.
    grads_finite: a bool or number that is false if the caller detected an
      overflow.
    grads_amax: the largest unscaled magnitude that the caller saw in the
      backward pass; a number, or None.
    needs_amax: whether to compute the largest magnitude.
    loss_scale: the loss scale of the gradients; None if they are unscaled.
    max_norm: the largest global norm allowed, or None.
    axis_name: the axes whose devices skip a step together, or None.

  Returns:
    A :class:`GradStats`.

  Raises:
    TypeError: if ``grads_finite`` or ``grads_amax`` is not a number.
    ValueError: if one of them is not a scalar, or the norm cannot be computed
      over the axes.
  """
  # Multiply the reductions by the reciprocal instead of dividing the gradients,
  # as `unscale_grads` does: XLA on CPU would write the quotients to memory,
  # which is a tenth of all bytes that a step writes.
  inv_scale = None if loss_scale is None else 1 / loss_scale
  if max_norm is None:
    finite, clip_factor = _grads.all_finite_by_sum(grads, inv_scale), None
    multiplier = inv_scale
  else:
    squares = [_grads.sum_of_squares(grad) for grad in grads]
    norm = _mul_or_identity(
      lax.sqrt(_axes.sum_over_axes(squares, axis_name)), inv_scale
    )
    # False for a NaN. The bound is not inf, because unscaling by a scale below
    # 1 may make a finite gradient infinite.
    finite = norm <= _grads.MAX_GRAD
    clip_factor = _compute_clip_factor(norm, max_norm)
    multiplier = _mul_or_identity(clip_factor, inv_scale)
  finite &= _as_flag("grads_finite", grads_finite)
  caller_amax = (
    None if grads_amax is None else _as_magnitude("grads_amax", grads_amax)
  )
  amax = None
  if needs_amax:
    amax = _mul_or_identity(_grads.largest_magnitude(grads), inv_scale)
    if caller_amax is not None:
      # Unlike maximum, fmax ignores a NaN.
      amax = jnp.fmax(amax, caller_amax)
  return GradStats(
    _axes.all_reduce_and(finite, axis_name),
    None if amax is None else _axes.max_over_axes(amax, axis_name),
    loss_scale,
    clip_factor,
    multiplier,
  )


def unscale_or_zero(grad: Any, stats: GradStats) -> jax.Array:
  """Unscale and clip a gradient; return zeros if the step is not finite."""
  grad, multiplier = (
    jnp.asarray(_arrays.upcast_to_float32(grad)),
    stats.multiplier,
  )
  if stats.loss_scale is not None and jnp.finfo(grad.dtype).bits > 32:
    # `multiplier` holds a reciprocal that is rounded to float32, which would
    # lose digits of a float64 gradient.
    grad, multiplier = (
      _arrays.unscale_by(grad, stats.loss_scale),
      stats.clip_factor,
    )
  if multiplier is not None:
    grad = _arrays.scale_by(grad, multiplier)
  return lax.select(stats.finite, grad, lax.full_like(grad, 0))


def _compute_clip_factor(
  norm: jax.Array, max_norm: jax.typing.ArrayLike
) -> jax.Array:
  max_norm = lax.convert_element_type(max_norm, jnp.float32)
  return jnp.where(norm > max_norm, max_norm / norm, jnp.float32(1))


def _mul_or_identity(x: jax.Array, factor: jax.Array | None) -> jax.Array:
  return x if factor is None else x * factor


def _as_flag(name: str, value: Any) -> jax.Array:
  """Convert a bool or number to a bool[]; 0 and NaN are false."""
  expected = "bool or number that is true if the gradients are finite"
  _check_scalar(name, value, expected, "jnp.all")
  if _is_host_scalar(value):
    # Test it in NumPy: JAX would round 1e-300 to 0 and reject large integers.
    value = np.asarray(value)
    return jnp.asarray(bool((value != 0) & (value == value)))
  value = jnp.asarray(value)
  if jnp.issubdtype(value.dtype, jnp.bool_):
    return value
  return (value != 0) & (value == value)


def _as_magnitude(name: str, value: Any) -> jax.Array:
  """Return the magnitude of a number as a float32[]."""
  expected = "number, the largest magnitude of a gradient"
  _check_scalar(name, value, expected, "jnp.max")
  if not _is_host_scalar(value):
    return lax.convert_element_type(jnp.abs(jnp.asarray(value)), jnp.float32)
  magnitude = abs(np.asarray(value).item())
  # A finite float64 or integer must not become inf in float32.
  if magnitude != np.inf:
    magnitude = min(magnitude, _arrays.FLOAT32_MAX)
  return jnp.asarray(float(magnitude), jnp.float32)


def _is_host_scalar(value: Any) -> bool:
  """Return whether a value is a Python or NumPy number, not a JAX array."""
  return isinstance(value, (int, float, complex, np.generic, np.ndarray))


def _check_scalar(name: str, value: Any, expected: str, reduction: str) -> None:
  requirement = f"{name} must be a single {expected}"
  hint = f"Reduce an array with {reduction}, or leave out {name}."
  if not _arrays.is_array_like(value):
    raise TypeError(f"{requirement}, got {name} = {value!r}. {hint}")
  shape, dtype = jnp.shape(value), jnp.result_type(value)
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    raise TypeError(f"{requirement}, got {name} of dtype {dtype}. {hint}")
  if shape:
    raise ValueError(f"{requirement}, got {name} of shape {shape}. {hint}")
