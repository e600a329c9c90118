"""The limits of dtypes, checks of arguments, and how reports are printed."""

from collections.abc import Callable, Mapping, Sequence
import html
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _state

# For each exponential, computes the largest operand with a finite result from
# the largest number of a dtype.
OVERFLOW_THRESHOLDS: dict[str, Callable[[float], float]] = {
  "exp": math.log,
  "exp2": math.log2,
  "expm1": math.log,
  "cosh": lambda dtype_max: math.log(2 * dtype_max),
  "sinh": lambda dtype_max: math.log(2 * dtype_max),
}


class DtypeLimits(NamedTuple):
  """The magnitudes at which a cast to a dtype underflows or overflows.

  Attributes:
    underflow_threshold: the largest magnitude that becomes zero.
    smallest_normal: the smallest magnitude that is normal.
    overflow_threshold: the smallest magnitude that becomes infinite.
  """

  underflow_threshold: float
  smallest_normal: float
  overflow_threshold: float


def get_dtype_limits(dtype: np.dtype) -> DtypeLimits:
  """Return the magnitudes at which a cast to a dtype under- or overflows."""
  info = jnp.finfo(dtype)
  dtype_max = float(info.max)
  # From half a unit in the last place above the largest number, numbers are
  # rounded to inf.
  ulp = 2.0 ** math.floor(math.log2(dtype_max)) * float(info.eps)
  return DtypeLimits(
    underflow_threshold=float(info.smallest_subnormal) / 2,
    smallest_normal=float(info.smallest_normal),
    overflow_threshold=dtype_max + ulp / 2,
  )


def check_float_dtype(dtype: Any) -> np.dtype:
  """Return a dtype, or raise if it is no float dtype of at most 32 bits."""
  dtype = np.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating) or dtype == np.float64:
    raise TypeError(
      "dtype must be a float dtype of at most 32 bits, such as float16, got"
      f" dtype = {dtype}."
    )
  return dtype


def to_float_scale(loss_scale: Any) -> float:
  """Return the loss scale of a number or a state, checked."""
  if _state.has_loss_scale(loss_scale):
    loss_scale = _state.get_loss_scale_state(loss_scale).loss_scale
  _checks.check_scale("loss_scale", loss_scale)
  return float(loss_scale)


def format_overflow_threshold(primitive: str, dtype: np.dtype) -> str:
  """Return the operand above which an exponential is infinite: ``"11.1"``."""
  if primitive not in OVERFLOW_THRESHOLDS:
    return ""
  return f"{OVERFLOW_THRESHOLDS[primitive](float(jnp.finfo(dtype).max)):.3g}"


class PrintedReport:
  """A report that a notebook shows like ``print`` does."""

  def _repr_html_(self) -> str:
    return f"<pre>{html.escape(str(self))}</pre>"


def location_cells(row: Any) -> dict[str, str]:
  """Return the first two cells of a row about an operation."""
  backward_suffix = ", backward" if row.backward else ""
  return {
    "": row.primitive,
    "name": f"{row.name or 'unknown'}{backward_suffix}",
  }


def format_table(
  rows: Sequence[Mapping[str, str]], num_left_aligned: int
) -> str:
  """Format a table, with a header.

  Args:
    rows: at least one row, from the names of the columns to the cells.
    num_left_aligned: the number of columns, from the first one, that are
      aligned to the left.

  Returns:
    The lines of the table, as one string.
  """
  lines = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < num_left_aligned else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
