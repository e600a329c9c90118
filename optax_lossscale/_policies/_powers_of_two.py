"""Powers of two and binary logarithms that are exact on every backend.

XLA's logarithms and powers are not exact: on CPU, its log2(32768) is 14.999999.
"""

import jax
from jax import lax
import jax.numpy as jnp


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
