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
_HOST_CHECK_MAX_SIZE = 2**20


def all_finite(x: Any) -> bool:
  """Whether an array is finite; all that are no floats are."""
  # What a Ref holds is looked at when it is read.
  if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
    return True
  if x.size > _HOST_CHECK_MAX_SIZE:
    return bool(_all_finite_on_device(x))
  return not nonfinite_mask(to_numpy(x)).any()


@jax.jit
def _all_finite_on_device(x: Any) -> Any:
  return jnp.isfinite(_arrays.upcast_for_reduction(x)).all()


def to_numpy(x: Any) -> np.ndarray:
  """An array on the host, in a dtype that numpy knows of."""
  x = np.asarray(x)
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  if is_float and not np.issubdtype(x.dtype, np.floating):
    with np.errstate(all="ignore"):  # To widen a NaN is no mistake.
      return x.astype(np.float32)
  return x


def nonfinite_mask(x: Any) -> np.ndarray:
  """Which entries of an array are not finite."""
  return ~np.isfinite(to_numpy(x))


def empty_taint(like: Any) -> np.ndarray:
  """Marks of this shape that mark nothing."""
  return np.zeros(like.shape, np.uint32)


def mask_other_origins(
  array: jax.Array, taint: np.ndarray | None, bit: int, neutral_value: float
) -> Any:
  """The array, with a neutral number in each entry with marks but this one."""
  if taint is None:
    return array
  other_mask = (taint != 0) & (taint & np.uint32(bit) == 0)
  if not other_mask.any():
    return array
  masked_array = np.where(
    other_mask, np.asarray(neutral_value, array.dtype), np.asarray(array)
  )
  return device_put_like(masked_array, array)


def device_put_like(x: np.ndarray, like: jax.Array) -> Any:
  """An array of the host on the mesh of another; as it is if there is none.

  What runs an operation brings it to the device in less time.
  """
  is_on_mesh = isinstance(like.sharding, jax.sharding.NamedSharding)
  return jax.device_put(x, like.sharding) if is_on_mesh else x


def attribute_taint(
  out: jax.Array,
  out_all_masked: jax.Array | None,
  outs_by_origin: dict[int, jax.Array],
  fallback_bits: int,
  constant_bits: int,
) -> tuple[np.ndarray, np.ndarray]:
  """The marks of an output, and which entries are the operation's own."""
  nonfinite = nonfinite_mask(out)
  is_own = np.zeros_like(nonfinite)
  if out_all_masked is not None:
    is_own = nonfinite & nonfinite_mask(out_all_masked)
  taint = empty_taint(out)
  for bit, origin_out in outs_by_origin.items():
    is_reached = nonfinite & nonfinite_mask(origin_out) & ~is_own
    taint[is_reached] |= np.uint32(bit)
  taint[nonfinite & ~is_own & (taint == 0)] = np.uint32(fallback_bits)
  # An inf that was written there is no fault. The NaN that is made of it is.
  is_constant = (taint != 0) & (taint & ~np.uint32(constant_bits) == 0)
  return taint, is_own | (np.isnan(to_numpy(out)) & is_constant)


def fill_untainted(
  taint: np.ndarray | None, out: jax.Array, bits: int
) -> np.ndarray:
  """The marks, with these bits on what is not finite and has none."""
  current_taint = np.uint32(0) if taint is None else taint
  return np.where(
    nonfinite_mask(out) & (current_taint == 0), np.uint32(bits), current_taint
  )


def has_nan(x: jax.Array) -> bool:
  """Whether an array holds a NaN."""
  return bool(np.isnan(to_numpy(x)).any())
