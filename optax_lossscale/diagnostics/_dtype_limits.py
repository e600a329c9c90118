"""The magnitudes at which numbers underflow and overflow in a dtype."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

# For each exponential, computes the largest operand with a finite result from
# the largest number of a dtype.
OVERFLOW_THRESHOLDS: dict[str, Callable[[float], float]] = {
  "exp": math.log,
  "exp2": math.log2,
  "expm1": math.log,
  "cosh": lambda dtype_max: math.log(2 * dtype_max),
  "sinh": lambda dtype_max: math.log(2 * dtype_max),
}


class CastThresholds(NamedTuple):
  """The magnitudes at which a cast to a dtype underflows or overflows.

  Attributes:
    underflow_threshold: the largest magnitude that becomes zero.
    smallest_normal: the smallest magnitude that is normal.
    overflow_threshold: the smallest magnitude that becomes infinite.
  """

  underflow_threshold: float
  smallest_normal: float
  overflow_threshold: float


def get_cast_thresholds(dtype: np.dtype) -> CastThresholds:
  """Return the magnitudes at which a cast to a dtype under- or overflows."""
  info = jnp.finfo(dtype)
  dtype_max = float(info.max)
  # From half a unit in the last place above the largest number, numbers are
  # rounded to inf.
  ulp = 2.0 ** math.floor(math.log2(dtype_max)) * float(info.eps)
  return CastThresholds(
    underflow_threshold=float(info.smallest_subnormal) / 2,
    smallest_normal=float(info.smallest_normal),
    overflow_threshold=dtype_max + ulp / 2,
  )


def format_overflow_threshold(primitive: str, dtype: np.dtype) -> str:
  """Return the operand above which an exponential is infinite: ``"11.1"``."""
  if primitive not in OVERFLOW_THRESHOLDS:
    return ""
  return f"{OVERFLOW_THRESHOLDS[primitive](float(jnp.finfo(dtype).max)):.3g}"
