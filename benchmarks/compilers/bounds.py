"""The least time of a step on a GPU, the largest batch, and their table."""

from collections.abc import Callable
from typing import Any

from gpus import Gpu
import scheduled_hlo
from shared.tables import tabulate

# On a T4 with 16 GB, CUDA reports 15.8 GB (16.9 GB on a V100), of which its
# context and the libraries take some hundred MB.
AVAILABLE = 15 * 10**9
# The batches that are tried are multiples of 8, for tensor cores, around FIRST.
MULTIPLE = 8
FIRST = 64


def least_seconds(
  gpu: Gpu, bytes_moved: int, flops: dict[str, int]
) -> dict[str, float]:
  """Return lower bounds on the time of a step, from the data sheet.

  A step is at least as long as moving its bytes at the full bandwidth, and as
  computing its matmuls at peak FLOPs. The measured time is longer: kernels
  wait, none reaches a limit, and some are bound by memory, others by FLOPs.

  Returns:
    Both bounds in seconds, ``"memory"`` and ``"products"``, the matmuls. The
    larger one is the bound of the step.
  """
  matmul_seconds = sum(n / gpu.flops[dtype] for dtype, n in flops.items())
  bounds = {"memory": bytes_moved / gpu.bandwidth, "products": matmul_seconds}
  return {name: round(seconds, 5) for name, seconds in bounds.items()}


def largest_batch(
  memory_needed: Callable[[int], int], available: int = AVAILABLE
) -> int:
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


COLUMNS = {
  "": "{variant}",
  "GB moved": lambda f: f"{f['bytes'] / 1e9:.1f}",
  "GB needed": lambda f: f"{f['needed'] / 1e9:.1f}",
  "kernels": "{kernels:,}",
  "largest batch": lambda f: str(f["largest_batch"] or ""),
  "ms at least, memory": lambda f: f"{1e3 * f['seconds']['memory']:.0f}",
  "products": lambda f: f"{1e3 * f['seconds']['products']:.0f}",
  "library calls": lambda f: scheduled_hlo.format_matmuls(f["products"]),
}


def format_steps(by_variant: dict[str, dict[str, Any]]) -> str:
  """Return the figures of one model on one device as Markdown."""
  rows = [{"variant": name} | found for name, found in by_variant.items()]
  return tabulate(COLUMNS, rows)
