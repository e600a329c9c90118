"""Powers of two and their exponents, exact on every backend.

XLA's functions for logarithms and powers are not exact: on CPU its log2(32768)
is 14.999999.
"""

import jax
from jax import lax
import jax.numpy as jnp


def exp2(exponent: jax.Array) -> jax.Array:
  """2**exponent in float32, for an int32 in [-126, 127]; inf for 128."""
  # In the bits of a float32 number the exponent starts at bit 23. The mantissa
  # of a power of two is zero.
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def floor_log2(x: jax.typing.ArrayLike) -> jax.Array:
  """The exponent of the largest power of two that is not above a positive x."""
  return jnp.frexp(jnp.asarray(x, jnp.float32))[1] - 1


def ceil_log2(x: jax.typing.ArrayLike) -> jax.Array:
  """The exponent of the least power of two that is not below a positive x."""
  mantissa, exponent = jnp.frexp(jnp.asarray(x, jnp.float32))
  return exponent - (mantissa == 0.5).astype(exponent.dtype)


def log2(x: jax.Array) -> jax.Array:
  """The logarithm of a positive float32, exact for powers of two."""
  mantissa, exponent = jnp.frexp(x)
  # Its logarithm is exact for a mantissa of 1.
  return jnp.log2(2 * mantissa) + (exponent - 1).astype(jnp.float32)
