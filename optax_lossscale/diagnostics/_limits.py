"""What a dtype can hold, and the scale at which that is asked."""

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
