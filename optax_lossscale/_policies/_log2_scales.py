"""Scales as their binary logarithms, and the scales that suit a dtype.

The conversions are exact on every backend. XLA's logarithms and powers are not:
on CPU, its log2(32768) is 14.999999.
"""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays


def exp2(exponent: jax.Array) -> jax.Array:
  """Return 2**exponent in float32 for an int32 in [-126, 127]; inf for 128."""
  # The exponent field of a float32 starts at bit 23 and has a bias of 127. The
  # mantissa field of a power of two is zero.
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def floor_log2(x: jax.typing.ArrayLike) -> jax.Array:
  """Return the exponent of the largest power of two <= a positive x."""
  return jnp.frexp(jnp.asarray(x, jnp.float32))[1] - 1


def ceil_log2(x: jax.typing.ArrayLike) -> jax.Array:
  """Return the exponent of the smallest power of two >= a positive x."""
  mantissa, exponent = jnp.frexp(jnp.asarray(x, jnp.float32))
  # The mantissa is in [0.5, 1), and 0.5 only for a power of two.
  return exponent - (mantissa == 0.5).astype(exponent.dtype)


def log2(x: jax.Array) -> jax.Array:
  """Return log2 of a positive float32, exactly if it is a power of two."""
  mantissa, exponent = jnp.frexp(x)
  # For a power of two the argument is 1, whose logarithm XLA computes exactly.
  return jnp.log2(2 * mantissa) + (exponent - 1).astype(jnp.float32)


def compute_log2_range(
  amax: jax.Array,
  dtype: Any,
  margin: jax.typing.ArrayLike,
  bounds: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Return log2 of the scales between which a magnitude is useful in a dtype.

  Args:
    amax: the magnitude; float32, shape ``()``. Zero if it is unknown.
    dtype: the dtype.
    margin: the number of binades below the largest number of the dtype.
    bounds: log2 of the lowest and of the highest scale.

  Returns:
    log2 of the scale with which the magnitude is ``margin`` binades below the
    largest number of the dtype, and of the scale with which it is the smallest
    normal number; the highest and the lowest scale if it is unknown.
  """
  (low, high), info = bounds, jnp.finfo(dtype)
  margin = _arrays.cast(margin, jnp.int32)
  top_mantissa, top_exponent = math.frexp(get_largest(dtype))
  mantissa, exponent = jnp.frexp(amax)
  target = top_exponent - margin - exponent
  # frexp's mantissas are in [0.5, 1). If that of amax is larger than that of
  # the largest number, equal exponents would exceed it.
  target -= (mantissa > top_mantissa).astype(jnp.int32)
  target = jnp.clip(jnp.where(amax > 0, target, high), low, high)
  num_binades = info.maxexp - 1 - info.minexp - margin
  min_useful = jnp.maximum(target - num_binades, low)
  return target, jnp.where(amax > 0, min_useful, low)


def get_largest(dtype: Any) -> float:
  """Return the largest number of a dtype, at most that of float32."""
  return min(float(jnp.finfo(dtype).max), _arrays.FLOAT32_MAX)


def get_smallest(dtype: Any) -> float:
  """Return the smallest positive number of a dtype that float32 keeps."""
  smallest = float(jnp.finfo(dtype).smallest_subnormal)
  return max(smallest, _arrays.FLOAT32_TINY)
