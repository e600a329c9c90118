"""The search for gradients, after steps in a row that brought none."""

import jax
import jax.numpy as jnp

# In steps that brought no gradients.
SHORTEST_WAIT, _LONGEST_WAIT = 8, 512
# Of so many steps of a search, one is a guess, and one at the evidence.
_STEPS_OF_A_GUESS = 4
# float16 holds a gradient at 40 scales in a row: at two guesses or three.
_STRIDE = 16
# So many guesses in a row are each a stride above the one before: ten of them
# are the whole range. Without any hash, gradients in every n-th step could meet
# the same guesses for ever.
_IN_ORDER = 16


def search_delay_after(
  search_delay: jax.Array,
  steps_without_grads: jax.Array,
  was_in_vain: jax.Array,
) -> jax.Array:
  """How long to wait for a search, after gradients that came.

  Args:
    search_delay: how many quiet steps there were to wait for.
    steps_without_grads: how many came before these gradients.
    was_in_vain: whether they would have been seen without a search.
  """
  longer = jnp.minimum(2 * search_delay, _LONGEST_WAIT)
  shorter = jnp.maximum(search_delay - search_delay // 8, SHORTEST_WAIT)
  after_search = jnp.where(was_in_vain, longer, search_delay)
  without = jnp.where(steps_without_grads == 0, shorter, search_delay)
  return jnp.where(steps_without_grads >= search_delay, after_search, without)


def next_guess(
  step: jax.Array,
  steps_since_overflow: jax.Array,
  best: jax.Array,
  bounds: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Whether the next step is a guess, and its exponent.

  Args:
    step: the number of the step in the search, which is off below zero.
    steps_since_overflow: any number that is another one in the next search, so
      that what comes after as many zeros each time does not meet the same guess
      for ever.
    best: the exponent that the last gradients ask for.
    bounds: the exponents of the lowest and of the highest scale.
  """
  low, high = bounds
  block = step // _STEPS_OF_A_GUESS
  turn = (_hash(block) + _hash(steps_since_overflow) + step) % _STEPS_OF_A_GUESS
  shift = _hash(block // _IN_ORDER + (1 << 19))
  guess = low + _STRIDE * ((block + shift) % ((high - low) // _STRIDE + 1))
  is_guess = (step >= 0) & (turn % 2 == 0)
  return is_guess, jnp.where(turn == 0, guess, best)


def _hash(x: jax.Array) -> jax.Array:
  """An integer in [0, 2**15) for each int32, without any order."""
  x = x.astype(jnp.uint32) * jnp.uint32(0xA0E51D65)
  x = (x ^ x >> 15) * jnp.uint32(0xB460A327)
  return ((x ^ x >> 16) & 0x7FFF).astype(jnp.int32)
