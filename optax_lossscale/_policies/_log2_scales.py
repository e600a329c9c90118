"""Scales as their binary logarithms, for a dtype and in a search.

The conversions are exact on every backend. XLA's logarithms and powers are not:
on CPU, its log2(32768) is 14.999999.

A search begins after several steps without gradients. Gradients of zero may
have underflowed, and nonfinite gradients may have overflowed, so the search
tries scales from the whole range. It is stateless: a proposal is a function of
counters in the policy state.
"""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays

# In steps without gradients.
MIN_SEARCH_DELAY, _MAX_SEARCH_DELAY = 8, 512
# In a search, one of 4 steps tries a proposed scale, and one tries the target.
_SEARCH_PERIOD = 4
# In binades. float16 represents a gradient at 40 consecutive powers of two, so
# two or three of the proposals fit each gradient.
_PROPOSAL_STRIDE = 16
# So many proposals in a row ascend by one stride each, and ten of them cover
# the whole range. Then a hash chooses a new offset: without hashing, gradients
# in every n-th step could meet the same few proposals forever.
_PROPOSALS_PER_SHUFFLE = 16


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


def update_search_delay(
  search_delay: jax.Array,
  steps_without_grads: jax.Array,
  search_was_unneeded: jax.Array,
) -> jax.Array:
  """Return the search delay after a step with gradients.

  Args:
    search_delay: the number of steps without gradients that started a search
      until now.
    steps_without_grads: the number of steps without gradients before this step.
    search_was_unneeded: whether these gradients would have been representable
      without a search.

  Returns:
    Twice the delay after an unneeded search; 7/8 of it after two steps in a row
    with gradients; else the same delay.
  """
  longer = jnp.minimum(2 * search_delay, _MAX_SEARCH_DELAY)
  shorter = jnp.maximum(search_delay - search_delay // 8, MIN_SEARCH_DELAY)
  delay_after_search = jnp.where(search_was_unneeded, longer, search_delay)
  delay_without_search = jnp.where(
    steps_without_grads == 0, shorter, search_delay
  )
  return jnp.where(
    steps_without_grads >= search_delay,
    delay_after_search,
    delay_without_search,
  )


def propose_log2_scale(
  search_step: jax.Array,
  steps_since_overflow: jax.Array,
  target_log2_scale: jax.Array,
  log2_scale_bounds: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Return whether the search chooses the next scale, and log2 of that scale.

  Args:
    search_step: the index of the step in the search; negative before a search.
    steps_since_overflow: a number that differs in the next search. Otherwise
      gradients that follow the same number of zeros each time would meet the
      same proposal forever.
    target_log2_scale: log2 of the target scale.
    log2_scale_bounds: log2 of the lowest and of the highest scale.
  """
  low, high = log2_scale_bounds
  period_index = search_step // _SEARCH_PERIOD
  # Every other step tries a proposal (phase 0) or the target (phase 2). The
  # hashes vary which steps of a period these are.
  phase = (
    _hash(period_index) + _hash(steps_since_overflow) + search_step
  ) % _SEARCH_PERIOD
  offset = _hash(period_index // _PROPOSALS_PER_SHUFFLE + (1 << 19))
  proposal = low + _PROPOSAL_STRIDE * (
    (period_index + offset) % ((high - low) // _PROPOSAL_STRIDE + 1)
  )
  is_proposal = (search_step >= 0) & (phase % 2 == 0)
  return is_proposal, jnp.where(phase == 0, proposal, target_log2_scale)


def _hash(x: jax.Array) -> jax.Array:
  """Return a pseudorandom integer in [0, 2**15) for each int32."""
  x = x.astype(jnp.uint32) * jnp.uint32(0xA0E51D65)
  x = (x ^ x >> 15) * jnp.uint32(0xB460A327)
  return ((x ^ x >> 16) & 0x7FFF).astype(jnp.int32)
