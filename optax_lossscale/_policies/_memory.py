"""What the policy that follows the gradients remembers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NOTHING = 128  # above the exponent of each scale


class HeadroomMemory(NamedTuple):
  """What :class:`HeadroomLossScale` remembers.

  Scales are told by their binary logarithms.

  Attributes:
    limit: the scale that what held gradients and what overflowed allow; int32,
      shape ``()``.
    fail: the scale that failed last, or 128 if there is none, or if one as high
      has held gradients since; int32, shape ``()``.
    held_count: steps with gradients since the last overflow, or since the last
      time that the scale that failed was tried again; int32, shape ``()``.
    quiet_count: steps in a row that brought no gradients, since all were zero
      or some were not finite; int32, shape ``()``.
    wait: how many of these it takes until a search begins; int32, shape
      ``()``.
    amax_window: the largest magnitude of each of the last steps that had
      gradients other than zero, the newest first; float32, shape ``(window,)``.
      Zeros where there was no such step yet.
  """

  limit: jax.Array
  fail: jax.Array
  held_count: jax.Array
  quiet_count: jax.Array
  wait: jax.Array
  amax_window: jax.Array


def initial_memory(limit: jax.Array, wait: int, window: int) -> HeadroomMemory:
  """The memory before the first step, with as many maxima as the window."""
  return HeadroomMemory(
    limit=limit,
    fail=jnp.full((), NOTHING, jnp.int32),
    held_count=jnp.zeros((), jnp.int32),
    quiet_count=jnp.zeros((), jnp.int32),
    wait=jnp.full((), wait, jnp.int32),
    amax_window=jnp.zeros((window,), jnp.float32),
  )
