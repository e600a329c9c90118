"""How many numbers there are of each size, as float16 takes them."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks

# There is a bin for what float16 takes for zero, one for each of its binades in
# ascending order (the first ten are those of its subnormal numbers), one for
# finite numbers that are too large for it, and one for inf and NaN.
_LOWEST, _HIGHEST = -24, 15
TOO_LARGE = 1 + _HIGHEST - _LOWEST + 1
NONFINITE = TOO_LARGE + 1
BINS = NONFINITE + 1


def count(x: jax.Array) -> jax.Array:
  """How many numbers are in each bin; float32, shape ``(BINS,)``.

  It counts in integers. A float32 to which 1 is added again and again stops at
  2**24.
  """
  if isinstance(x.size, int):
    in_parts = x.size > _checks.LARGEST_COUNT
  else:  # A symbolic size, as `jax.export` has, may turn out to be any.
    in_parts = x.ndim > 1
  if in_parts:
    return jnp.sum(jax.vmap(count)(x), axis=0)
  if _arrays.is_complex(x.dtype):
    return count(x.real) + count(x.imag)
  bins = _bin(x)
  # To scatter into the counters is fastest on CPU. On other devices all threads
  # would wait for the same few counters. Explicit shardings cannot scatter.
  if any(jax.typeof(x).sharding.spec):
    counts = _count_by_comparing(bins)
  else:
    counts = lax.platform_dependent(
      bins, cpu=_count_by_scattering, default=_count_by_comparing
    )
  return counts.astype(jnp.float32)


def largest(counts: jax.Array) -> jax.Array:
  """The largest float16 number in the highest bin that is not empty."""
  # float16 numbers in a binade are 2**(e - 10) apart, subnormal ones 2**-24.
  e = np.arange(_LOWEST, _HIGHEST + 1.0)
  tops = 2 ** (e + 1) - 2 ** np.maximum(e - 10, _LOWEST)
  tops = jnp.array([0, *tops, 2**16], jnp.float32)
  is_used = counts[..., :NONFINITE] > 0
  return jnp.max(jnp.where(is_used, tops, jnp.float32(0)), axis=-1)


def _bin(x: jax.Array) -> jax.Array:
  """The bin of each number, from its bits, so that no number is flushed."""
  if x.dtype == jnp.float64:
    top = _arrays.FLOAT32_MAX
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x)
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  exponent = (bits >> 23) & 0xFF
  bins = jnp.clip(exponent - (127 + _LOWEST - 1), 0, TOO_LARGE)
  return jnp.where(exponent == 0xFF, jnp.int32(NONFINITE), bins)


def _count_by_scattering(bins: jax.Array) -> jax.Array:
  return jnp.zeros((BINS,), jnp.int32).at[bins].add(1)


def _count_by_comparing(bins: jax.Array) -> jax.Array:
  each = lax.broadcasted_iota(jnp.int32, (BINS,) + (1,) * bins.ndim, 0)
  axes = tuple(range(1, bins.ndim + 1))
  return jnp.sum(bins[None] == each, axis=axes, dtype=jnp.int32)
