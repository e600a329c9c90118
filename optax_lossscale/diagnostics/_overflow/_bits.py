"""Arrays of marks: made, put and read on the host.

On a device, each of these functions would be compiled once for each shape, and
the compiler, not the arithmetic, is what a diagnosis waits for.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays

# To look at a larger array costs less than to bring it to the host.
_LARGE = 2**20


def is_finite(x: Any) -> bool:
  """Whether an array is finite; all that are no floats are."""
  # What a Ref holds is looked at when it is read.
  if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
    return True
  if x.size > _LARGE:
    return bool(_all_finite(x))
  return not not_finite(as_numbers(x)).any()


@jax.jit
def _all_finite(x: Any) -> Any:
  return jnp.isfinite(_arrays.upcast_for_reduction(x)).all()


def as_numbers(x: Any) -> np.ndarray:
  """An array on the host, in a dtype that numpy knows of."""
  x = np.asarray(x)
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  if is_float and not np.issubdtype(x.dtype, np.floating):
    with np.errstate(all="ignore"):  # To widen a NaN is no mistake.
      return x.astype(np.float32)
  return x


def not_finite(x: Any) -> np.ndarray:
  """Which entries of an array are not finite."""
  return ~np.isfinite(as_numbers(x))


def no_marks(like: Any) -> np.ndarray:
  """Marks of this shape that mark nothing."""
  return np.zeros(like.shape, np.uint32)


def keep_only(
  array: jax.Array, marks: np.ndarray | None, bit: int, neutral: float
) -> Any:
  """The array, with a neutral number in each entry with marks but this one."""
  if marks is None:
    return array
  others = (marks != 0) & (marks & np.uint32(bit) == 0)
  if not others.any():
    return array
  kept = np.where(others, np.asarray(neutral, array.dtype), np.asarray(array))
  return placed_like(kept, array)


def placed_like(x: np.ndarray, array: jax.Array) -> Any:
  """An array of the host on the mesh of another; as it is if there is none.

  What runs an operation brings it to the device in less time.
  """
  is_on_mesh = isinstance(array.sharding, jax.sharding.NamedSharding)
  return jax.device_put(x, array.sharding) if is_on_mesh else x


def attribute(
  out: jax.Array,
  without: jax.Array | None,
  alone: dict[int, jax.Array],
  rest: int,
  constants: int,
) -> tuple[np.ndarray, np.ndarray]:
  """The marks of an output, and which entries are the operation's own."""
  bad = not_finite(out)
  is_own = np.zeros_like(bad)
  if without is not None:
    is_own = bad & not_finite(without)
  marks = no_marks(out)
  for bit, with_this in alone.items():
    reached = bad & not_finite(with_this) & ~is_own
    marks[reached] |= np.uint32(bit)
  marks[bad & ~is_own & (marks == 0)] = np.uint32(rest)
  # An inf that was written there is no fault. The NaN that is made of it is.
  is_constant = (marks != 0) & (marks & ~np.uint32(constants) == 0)
  return marks, is_own | (np.isnan(as_numbers(out)) & is_constant)


def fill(marks: np.ndarray | None, out: jax.Array, bits: int) -> np.ndarray:
  """The marks, with these bits on what is not finite and has none."""
  there = np.uint32(0) if marks is None else marks
  return np.where(not_finite(out) & (there == 0), np.uint32(bits), there)


def has_nan(x: jax.Array) -> bool:
  """Whether an array holds a NaN."""
  return bool(np.isnan(as_numbers(x)).any())
