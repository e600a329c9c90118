"""The search for gradients, after steps in a row that brought none."""

import jax
import jax.numpy as jnp

# In steps that brought no gradients.
MIN_SEARCH_DELAY, _MAX_SEARCH_DELAY = 8, 512
# Of so many steps of a search, one is a guess, and one at the evidence.
_SEARCH_PERIOD = 4
# float16 holds a gradient at 40 scales in a row: at two guesses or three.
_PROPOSAL_STRIDE = 16
# So many guesses in a row are each a stride above the one before: ten of them
# are the whole range. Without any hash, gradients in every n-th step could meet
# the same guesses for ever.
_PROPOSALS_PER_SHUFFLE = 16


def update_search_delay(
  search_delay: jax.Array,
  steps_without_grads: jax.Array,
  search_was_unneeded: jax.Array,
) -> jax.Array:
  """How long to wait for a search, after gradients that came.

  Args:
    search_delay: how many quiet steps there were to wait for.
    steps_without_grads: how many came before these gradients.
    search_was_unneeded: whether they would have been seen without a search.
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
  """Whether the next step is a guess, and its exponent.

  Args:
    search_step: the number of the step in the search, which is off below zero.
    steps_since_overflow: any number that is another one in the next search, so
      that what comes after as many zeros each time does not meet the same guess
      for ever.
    target_log2_scale: the exponent that the last gradients ask for.
    log2_scale_bounds: the exponents of the lowest and of the highest scale.
  """
  low, high = log2_scale_bounds
  period_index = search_step // _SEARCH_PERIOD
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
  """An integer in [0, 2**15) for each int32, without any order."""
  x = x.astype(jnp.uint32) * jnp.uint32(0xA0E51D65)
  x = (x ^ x >> 15) * jnp.uint32(0xB460A327)
  return ((x ^ x >> 16) & 0x7FFF).astype(jnp.int32)
