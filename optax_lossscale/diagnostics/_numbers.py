"""What a dtype can hold, how numbers are printed, and in which tables."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _state


class Limits(NamedTuple):
  """Where a number becomes zero, normal or infinite in a dtype."""

  zero: float  # up to here a number becomes zero
  normal: float  # from here on it is normal
  inf: float  # from here on it is infinite


def limits_of(dtype: np.dtype) -> Limits:
  """Where a number becomes zero, normal or infinite in a dtype."""
  info = jnp.finfo(dtype)
  top = float(info.max)
  # From half a unit in the last place above the largest number, numbers are
  # rounded to inf.
  last_place = 2.0 ** math.floor(math.log2(top)) * float(info.eps)
  return Limits(
    zero=float(info.smallest_subnormal) / 2,
    normal=float(info.smallest_normal),
    inf=top + last_place / 2,
  )


def as_small_float(dtype: Any) -> np.dtype:
  """The dtype, checked."""
  dtype = np.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating) or dtype == np.float64:
    raise TypeError(
      "dtype must be a float dtype of at most 32 bits, such as float16, got"
      f" dtype = {dtype}."
    )
  return dtype


def as_scale(loss_scale: Any) -> float:
  """The scale, checked, that a number or a state stands for."""
  if _state.holds_loss_scale(loss_scale):
    loss_scale = _state.get_loss_scale_state(loss_scale).loss_scale
  _checks.check_scale("loss_scale", loss_scale)
  return float(loss_scale)


def where(row: Any) -> dict[str, str]:
  """The first two cells of a row that is about an operation in some place."""
  backward = ", backward" if row.backward else ""
  return {"": row.primitive, "name": f"{row.name or 'unknown'}{backward}"}


def table(rows: Sequence[Mapping[str, str]], left: int) -> str:
  """A table of at least one row, whose cells have the names of their columns.

  Args:
    rows: the rows, all with the same columns.
    left: how many columns are aligned to the left; the others are to the right.

  Returns:
    The lines.
  """
  lines = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
