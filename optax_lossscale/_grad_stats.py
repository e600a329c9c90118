"""What one pass over the gradients tells of a step, on all devices together."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _axes, _grads


class UpdateHints(NamedTuple):
  """What the caller of ``update`` knows beside the gradients.

  Attributes:
    grads_finite: a bool or number, true if nothing overflowed.
    grads_amax: the largest true magnitude that was seen; a number, or None.
  """

  grads_finite: Any
  grads_amax: Any


class GradStats(NamedTuple):
  """What is known of a step.

  Attributes:
    finite: whether the gradients are finite once they are true ones, on every
      device, and no caller knows of an overflow; bool[].
    amax: the largest magnitude of the true ones, or what the caller saw;
      float32[].
    loss_scale: the scale that is in the gradients that came; float32[], or None
      if they are true ones.
    clip_factor: what clips the true gradients; float32[], or None.
    multiplier: what does both, unscale and clip; float32[], or None.
  """

  finite: jax.Array
  amax: jax.Array
  loss_scale: jax.Array | None
  clip_factor: jax.Array | None
  multiplier: jax.Array | None


def measure_grads(
  grads: list[Any],
  hints: UpdateHints,
  *,
  loss_scale: jax.Array | None,
  max_norm: jax.typing.ArrayLike | None,
  axis_name: _axes.AxisName | None,
) -> GradStats:
  """Measures gradients as they come, true or scaled.

  Args:
    grads: the gradients.
    hints: what the caller knows beside them.
    loss_scale: the scale that is in them; None if they are true ones.
    max_norm: the largest global norm allowed, or None.
    axis_name: the axes over which the step is decided together, or None.

  Returns:
    A :class:`GradStats`.

  Raises:
    TypeError: if a part of the evidence is not a number.
    ValueError: if one is not a scalar, or the norm cannot be known.
  """
  # No division, as in `unscale_grads`: XLA on CPU would write the quotients to
  # memory, a tenth of a step's bytes.
  inv_scale = None if loss_scale is None else 1 / loss_scale
  amax = _mul_or_identity(_grads.largest_magnitude(grads), inv_scale)
  if max_norm is None:
    finite, clip_factor = _grads.all_finite_by_sum(grads, inv_scale), None
    multiplier = inv_scale
  else:
    squares = [_grads.sum_of_squares(grad) for grad in grads]
    norm = _mul_or_identity(
      lax.sqrt(_axes.sum_over_axes(squares, axis_name)), inv_scale
    )
    # False of a NaN, too. Unscaling by a scale below 1 may make a finite
    # gradient infinite.
    finite = norm <= _grads.MAX_GRAD
    clip_factor = _compute_clip_factor(norm, max_norm)
    multiplier = _mul_or_identity(clip_factor, inv_scale)
  finite &= _as_flag("grads_finite", hints.grads_finite)
  if hints.grads_amax is not None:
    hinted_amax = _as_magnitude("grads_amax", hints.grads_amax)
    amax = jnp.fmax(amax, hinted_amax)  # A NaN is no evidence.
  return GradStats(
    _axes.all_reduce_and(finite, axis_name),
    _axes.max_over_axes(amax, axis_name),
    loss_scale,
    clip_factor,
    multiplier,
  )


def unscale_or_zero(grad: Any, stats: GradStats) -> jax.Array:
  """The true gradient, widened and clipped; zeros if the step is not finite."""
  grad, multiplier = (
    jnp.asarray(_arrays.upcast_to_float32(grad)),
    stats.multiplier,
  )
  if stats.loss_scale is not None and jnp.finfo(grad.dtype).bits > 32:
    # The reciprocal is rounded to float32.
    grad, multiplier = (
      _arrays.unscale_by(grad, stats.loss_scale),
      stats.clip_factor,
    )
  if multiplier is not None:
    grad = _arrays.scale_by(grad, multiplier)
  return lax.select(stats.finite, grad, jnp.zeros_like(grad))


def _compute_clip_factor(
  norm: jax.Array, max_norm: jax.typing.ArrayLike
) -> jax.Array:
  max_norm = lax.convert_element_type(max_norm, jnp.float32)
  return jnp.where(norm > max_norm, max_norm / norm, jnp.float32(1))


def _mul_or_identity(x: jax.Array, factor: jax.Array | None) -> jax.Array:
  return x if factor is None else x * factor


def _as_flag(name: str, value: Any) -> jax.Array:
  """The value as a bool; of a number, whether it is neither 0 nor NaN."""
  expected = "bool or number that is true if the gradients are finite"
  _check_scalar(name, value, expected, "jnp.all")
  if _is_host_scalar(value):
    # As JAX has it, 1e-300 would be 0, and large integers are errors.
    value = np.asarray(value)
    return jnp.asarray(bool((value != 0) & (value == value)))
  value = jnp.asarray(value)
  if jnp.issubdtype(value.dtype, jnp.bool_):
    return value
  return (value != 0) & (value == value)


def _as_magnitude(name: str, value: Any) -> jax.Array:
  """The magnitude of a number, as float32."""
  expected = "number, the largest magnitude of a gradient"
  _check_scalar(name, value, expected, "jnp.max")
  if not _is_host_scalar(value):
    return lax.convert_element_type(jnp.abs(jnp.asarray(value)), jnp.float32)
  magnitude = abs(np.asarray(value).item())
  if magnitude != np.inf:
    magnitude = min(magnitude, _arrays.FLOAT32_MAX)
  return jnp.asarray(float(magnitude), jnp.float32)


def _is_host_scalar(value: Any) -> bool:
  """Whether a number is one of Python or NumPy, of any size and precision."""
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
