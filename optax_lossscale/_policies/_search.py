"""Search for a scale with gradients, after several steps without any.

Gradients of zero may have underflowed, and nonfinite gradients may have
overflowed, so the search tries scales from the whole range. It is stateless: a
proposal is a function of counters in the policy state.
"""

import jax
import jax.numpy as jnp

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
