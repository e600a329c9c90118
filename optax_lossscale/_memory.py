"""What the policy that follows the gradients remembers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _search


class HeadroomMemory(NamedTuple):
  """What :class:`HeadroomLossScale` remembers.

  Attributes:
    ceiling: the binary logarithm of the highest scale that overflows allow, or
      128 without a ceiling; int32, shape ``()``.
    credit: how many steps there are to pay for an overflow; int32, shape
      ``()``.
    quiet_count: steps in a row that brought no gradients, since all were zero
      or some were not finite; int32, shape ``()``.
    patience: how many such steps more than 48 it takes until the policy
      searches: four times their mean number between gradients; int32, shape
      ``()``.
    amax_window: the largest magnitude of each of the last steps that had
      gradients other than zero, the newest first; float32, shape ``(window,)``.
      Zeros where there was no such step yet.
  """

  ceiling: jax.Array
  credit: jax.Array
  quiet_count: jax.Array
  patience: jax.Array
  amax_window: jax.Array


def has_evidence(memory: HeadroomMemory) -> jax.Array:
  """Whether there were gradients; bool, shape ``()``."""
  return jnp.max(memory.amax_window) > 0


def is_searching(memory: HeadroomMemory) -> jax.Array:
  """Whether the search for gradients is on; bool, shape ``()``."""
  return _search.is_on(memory.quiet_count, memory.patience)
