"""The limits of dtypes, checks of arguments, and how reports are printed."""

from collections.abc import Callable, Mapping, Sequence
import html
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _state

# The largest operand of each exponential, from the largest number of a dtype.
OVERFLOW_THRESHOLDS: dict[str, Callable[[float], float]] = {
  "exp": math.log,
  "exp2": math.log2,
  "expm1": math.log,
  "cosh": lambda dtype_max: math.log(2 * dtype_max),
  "sinh": lambda dtype_max: math.log(2 * dtype_max),
}


class DtypeLimits(NamedTuple):
  """Where a number becomes zero, normal or infinite in a dtype."""

  underflow_threshold: float  # up to here a number becomes zero
  smallest_normal: float  # from here on it is normal
  overflow_threshold: float  # from here on it is infinite


def get_dtype_limits(dtype: np.dtype) -> DtypeLimits:
  """Where a number becomes zero, normal or infinite in a dtype."""
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
  """The dtype, checked."""
  dtype = np.dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating) or dtype == np.float64:
    raise TypeError(
      "dtype must be a float dtype of at most 32 bits, such as float16, got"
      f" dtype = {dtype}."
    )
  return dtype


def to_float_scale(loss_scale: Any) -> float:
  """The scale, checked, that a number or a state stands for."""
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
  """A report whose text is shown in a notebook as ``print`` shows it."""

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
    num_left_aligned: the number of columns that are aligned to the left, the
      first ones.

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
