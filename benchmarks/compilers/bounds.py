"""The largest batch whose step fits into the memory of a device."""

from collections.abc import Callable

# The batches that are tried are multiples of 8, for tensor cores, around FIRST.
MULTIPLE = 8
FIRST = 64


def largest_batch(memory_needed: Callable[[int], int], available: int) -> int:
  """Return the largest multiple of ``MULTIPLE`` whose step fits.

  The first guess is extrapolated from two small batches, but the result never
  is: from some size on, XLA rematerializes values to save memory, so larger
  batches fit than the small ones suggest.

  Returns:
    A batch that fits, while the next multiple does not; 0 if none fits.
  """
  half = FIRST // 2
  per_image = (memory_needed(FIRST) - memory_needed(half)) / half
  more = (available - memory_needed(FIRST)) / per_image
  guess = max(0, int(FIRST + more)) // MULTIPLE * MULTIPLE
  fits, too_large = _around(guess, memory_needed, available)
  while too_large - fits > MULTIPLE:
    batch = (fits + too_large) // 2 // MULTIPLE * MULTIPLE
    if memory_needed(batch) <= available:
      fits = batch
    else:
      too_large = batch
  return fits


def _around(guess, memory_needed, available):
  """Return a batch that fits and one that does not, from a growing search."""
  step = MULTIPLE
  if not guess or memory_needed(guess) <= available:
    while memory_needed(guess + step) <= available:
      guess, step = guess + step, 2 * step
    return guess, guess + step
  while guess > step and memory_needed(guess - step) > available:
    guess, step = guess - step, 2 * step
  return max(0, guess - step), guess
