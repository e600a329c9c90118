"""The search for gradients, after steps in a row that brought none."""

import jax
import jax.numpy as jnp

# In steps that brought no gradients.
QUIET_TO_SEARCH = 48
_LONGEST_PATIENCE = 1024
# Once there were gradients, so many steps of a search hold one guess.
_STEPS_OF_A_GUESS = 4
# float16 holds a gradient at 40 scales in a row: at two guesses or three.
_STRIDE = 16
# So many guesses in a row are each a stride above the one before: ten of them
# are the whole range. Without any hash, gradients in every n-th step could meet
# the same guesses for ever.
_IN_ORDER = 16


def is_on(quiet_count: jax.Array, patience: jax.Array) -> jax.Array:
  """Whether quiet steps in a row are so many that the search is on."""
  return quiet_count >= QUIET_TO_SEARCH + patience


def patience_after(patience: jax.Array, quiet_count: jax.Array) -> jax.Array:
  """The patience after gradients that came after so many quiet steps."""
  # Four times a mean to which each row adds a sixteenth.
  longer = patience - patience // 16 + quiet_count // 4
  return jnp.minimum(longer, _LONGEST_PATIENCE)


def next_guess(
  quiet_count: jax.Array,
  has_evidence: jax.Array,
  first: jax.Array,
  bounds: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Whether the next step of a search is a guess, and its exponent.

  Args:
    quiet_count: quiet steps in a row.
    has_evidence: whether there were gradients before.
    first: the exponent to try most often if there were none.
    bounds: the exponents of the lowest and of the highest scale.
  """
  low, high = bounds
  block = quiet_count // _STEPS_OF_A_GUESS
  is_turn = _hash(block) % _STEPS_OF_A_GUESS == quiet_count % _STEPS_OF_A_GUESS
  number = jnp.where(has_evidence, block, quiet_count)
  shift = _hash(number // _IN_ORDER + (1 << 19))
  count = (high - low) // _STRIDE + 1
  guess = low + _STRIDE * ((number + shift) % count)
  return is_turn | ~has_evidence, jnp.where(
    is_turn & ~has_evidence, first, guess
  )


def _hash(x: jax.Array) -> jax.Array:
  """An integer in [0, 2**15) for each int32, without any order."""
  x = x.astype(jnp.uint32) * jnp.uint32(0xA0E51D65)
  x = (x ^ x >> 15) * jnp.uint32(0xB460A327)
  return ((x ^ x >> 16) & 0x7FFF).astype(jnp.int32)
