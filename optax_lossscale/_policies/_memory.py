"""What the policy that follows the gradients remembers."""

from typing import NamedTuple

import jax


class HeadroomMemory(NamedTuple):
  """What :class:`HeadroomLossScale` remembers.

  Scales are told by their binary logarithms.

  Attributes:
    safe: the last scale that held gradients, or one that is taken to hold them
      after an overflow; int32, shape ``()``.
    fail: the lowest scale that overflowed since, or 128 if none did; int32,
      shape ``()``.
    credit: how many steps with gradients there are to pay for an overflow or
      for another try; int32, shape ``()``.
    term: how many of these it takes to try a scale again that failed; int32,
      shape ``()``.
    quiet_count: steps in a row that brought no gradients, since all were zero
      or some were not finite; int32, shape ``()``.
    wait: how many of these it takes until a search begins; int32, shape
      ``()``.
    amax_window: the largest magnitude of each of the last steps that had
      gradients other than zero, the newest first; float32, shape ``(window,)``.
      Zeros where there was no such step yet.
  """

  safe: jax.Array
  fail: jax.Array
  credit: jax.Array
  term: jax.Array
  quiet_count: jax.Array
  wait: jax.Array
  amax_window: jax.Array
