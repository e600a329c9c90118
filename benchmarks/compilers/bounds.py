"""What a GPU cannot do better than: the least time, and the largest batch."""

from collections.abc import Callable

from gpus import Gpu

# Of the memory of a card with 16 GB CUDA has 15.8 GB on a T4 (16.9 GB on a
# V100), and its context and the libraries take some hundred MB of it.
AVAILABLE = 15 * 10**9
# The batches that are tried: of sizes that tensor cores like, about FIRST.
MULTIPLE = 8
FIRST = 64


def least_seconds(
  gpu: Gpu, bytes_moved: int, flops: dict[str, int]
) -> dict[str, float]:
  """What a step takes at least by the data sheet: a bound, no measurement.

  A step can be no faster than its memory is read and written at the full
  bandwidth, nor than its products are computed at their peak. What runs takes
  longer: kernels wait, none of them reaches either limit, and what is not
  bound by the one may be bound by the other.

  Args:
    gpu: the data sheet.
    bytes_moved: the bytes that the kernels read and write.
    flops: of the products, by dtype.

  Returns:
    Both bounds in seconds, ``"memory"`` and ``"products"``. The larger counts.
  """
  products = sum(n / gpu.flops[dtype] for dtype, n in flops.items())
  bounds = {"memory": bytes_moved / gpu.bandwidth, "products": products}
  return {name: round(seconds, 5) for name, seconds in bounds.items()}


def largest_batch(
  memory_needed: Callable[[int], int], available: int = AVAILABLE
) -> int:
  """The largest multiple of ``MULTIPLE`` whose step fits.

  Two small batches say where to look first. What is returned is never
  extrapolated: from some size on XLA computes things again to save memory, so
  that more fits than they promise.

  Args:
    memory_needed: the bytes that a batch needs, which is compiled to know.
    available: bytes.

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
  """A batch that fits, and one that does not, in steps that grow."""
  step = MULTIPLE
  if not guess or memory_needed(guess) <= available:
    while memory_needed(guess + step) <= available:
      guess, step = guess + step, 2 * step
    return guess, guess + step
  while guess > step and memory_needed(guess - step) > available:
    guess, step = guess - step, 2 * step
  return max(0, guess - step), guess
