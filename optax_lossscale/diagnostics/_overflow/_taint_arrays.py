"""Operations on taint arrays: the origins of each nonfinite entry, as bits.

The taint of an array is a uint32 array of the same shape. The bits of an entry
are the origins that the entry comes from; a finite entry has no bits. Taint
arrays live on the host: on a device, each function here would be compiled for
each shape, and compilation already takes most of the time of ``find_overflow``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays

# A larger array is reduced on its device, since the transfer to the host would
# cost more than the compilation.
_HOST_CHECK_MAX_SIZE = 2**20


def all_finite(x: Any) -> bool:
  """Return whether an array is finite; True if its dtype is not inexact."""
  # A Ref is not checked here, but its contents are when an eqn reads them.
  if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
    return True
  if x.size > _HOST_CHECK_MAX_SIZE:
    return bool(_all_finite_on_device(x))
  return not nonfinite_mask(to_numpy(x)).any()


@jax.jit
def _all_finite_on_device(x: Any) -> Any:
  return jnp.isfinite(_arrays.upcast_for_reduction(x)).all()


def to_numpy(x: Any) -> np.ndarray:
  """Return an array on the host, in a dtype that NumPy supports."""
  x = np.asarray(x)
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  if is_float and not np.issubdtype(x.dtype, np.floating):
    with np.errstate(all="ignore"):  # NumPy warns of casts of NaN.
      return x.astype(np.float32)
  return x


def nonfinite_mask(x: Any) -> np.ndarray:
  """Return the mask of the entries that are not finite."""
  return ~np.isfinite(to_numpy(x))


def empty_taint(like: Any) -> np.ndarray:
  """Return a taint array of this shape without bits."""
  return np.zeros(like.shape, np.uint32)


def mask_other_origins(
  array: jax.Array, taint: np.ndarray | None, bit: int, neutral_value: float
) -> Any:
  """Replace the entries that are tainted only by other origins.

  Args:
    array: the array.
    taint: its taint.
    bit: the bit, or bits, of the origin whose entries stay; 0 for none.
    neutral_value: the number that replaces the other tainted entries.

  Returns:
    The array with the replaced entries.
  """
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
  """Move a host array to the mesh of another array; unchanged if it has none.

  Without a mesh, the jitted eqn transfers the array faster than ``device_put``.
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
  """Attribute the nonfinite entries of an output to origins.

  Args:
    out: the output of an eqn.
    out_all_masked: the output if all tainted entries of the operands are
      replaced by neutral numbers: entries that are still nonfinite are new.
      None if no number is neutral: then no entry counts as new.
    outs_by_origin: by bit, the output if only the entries of this origin
      remain: entries that are nonfinite then come from this origin.
    fallback_bits: the bits for entries that no origin explains on its own.
    constant_bits: the bits of constants that are inf.

  Returns:
    The taint of the output, and the mask of the entries that the eqn itself
    made nonfinite.
  """
  nonfinite = nonfinite_mask(out)
  is_own = np.zeros_like(nonfinite)
  if out_all_masked is not None:
    is_own = nonfinite & nonfinite_mask(out_all_masked)
  taint = empty_taint(out)
  for bit, origin_out in outs_by_origin.items():
    is_reached = nonfinite & nonfinite_mask(origin_out) & ~is_own
    taint[is_reached] |= np.uint32(bit)
  taint[nonfinite & ~is_own & (taint == 0)] = np.uint32(fallback_bits)
  # A constant inf is intended, such as a mask of -inf. A NaN that an eqn
  # computes from it is not, and becomes a new origin.
  is_constant = (taint != 0) & (taint & ~np.uint32(constant_bits) == 0)
  return taint, is_own | (np.isnan(to_numpy(out)) & is_constant)


def fill_untainted(
  taint: np.ndarray | None, out: jax.Array, bits: int
) -> np.ndarray:
  """Return the taint, with these bits on nonfinite entries without bits."""
  current_taint = np.uint32(0) if taint is None else taint
  return np.where(
    nonfinite_mask(out) & (current_taint == 0), np.uint32(bits), current_taint
  )


def has_nan(x: jax.Array) -> bool:
  """Return whether an array holds a NaN."""
  return bool(np.isnan(to_numpy(x)).any())
