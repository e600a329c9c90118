"""Find the power of two by which a loss scale must decrease."""

import bisect
from collections.abc import Callable

# The largest decrease that is tried, as a power of two. It takes any scale of a
# policy into the range where float16 gradients underflow.
_MAX_LOG2_DECREASE = 64


def find_log2_decrease(is_enough: Callable[[int], bool]) -> int | None:
  """Return the smallest decrease of the loss scale that is enough.

  Args:
    is_enough: takes log2 of the factor by which the scale decreases, and
      returns whether the step is finite then. It is not finite with 0.

  Returns:
    log2 of the factor; None if there is none.
  """
  # The step is not finite with `low`, and finite with `high`.
  low, high = 0, 1
  while not is_enough(high):
    if high == _MAX_LOG2_DECREASE:
      return None
    low, high = high, 2 * high
  return bisect.bisect_left(range(high), True, lo=low + 1, key=is_enough)
