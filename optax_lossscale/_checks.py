"""Argument validation, and the formatting of values in error messages."""

import math
from typing import Any

import jax
import jax.numpy as jnp

# Between these bounds, the loss scale and its reciprocal are both normal
# float32 numbers. The reciprocal of 2**127 is subnormal, and XLA flushes it to
# zero, so every unscaled gradient would silently be zero.
MIN_LOSS_SCALE = 2.0**-126
MAX_LOSS_SCALE = 2.0**126

# The float32 numbers next to 1. A factor closer to 1 would round to 1, and the
# scale would never change.
MIN_GROWTH_FACTOR = 1 + 2**-23
MAX_BACKOFF_FACTOR = 1 - 2**-24

# All counters are int32.
MAX_COUNT = 2**31 - 1

# The hyperparameters that every policy with a changing scale has.
_SCALE_FIELDS = ("init_scale", "min_scale", "max_scale")


def check_number(
  name: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
  """Raise unless value is a number in [low, high]; accept traced values."""
  if isinstance(value, jax.core.Tracer):
    return
  requirement = f"{name} must be {format_range(low, high, integer=integer)}"
  is_number = isinstance(value, (int, float)) or (
    hasattr(value, "dtype") and getattr(value, "shape", None) == ()
  )
  if isinstance(value, (bool, complex)) or not is_number:
    raise TypeError(f"{requirement}, got {describe_arg(name, value)}.")
  if hasattr(value, "dtype"):
    if value.dtype == bool or jnp.issubdtype(value.dtype, jnp.complexfloating):
      raise TypeError(f"{requirement}, got {name} = {value!r}.")
    value = value.item()
  in_range = low <= value <= high  # False for NaN.
  if not in_range or (integer and value != int(value)):
    raise ValueError(f"{requirement}, got {name} = {value!r}.")


def check_scale(name: str, value: Any) -> None:
  """Raise unless value is a valid loss scale; accept traced values."""
  check_number(name, value, MIN_LOSS_SCALE, MAX_LOSS_SCALE)


def check_count(name: str, value: Any) -> None:
  """Raise unless value is a positive int32; accept traced values."""
  check_number(name, value, 1, MAX_COUNT, integer=True)


def check_scale_fields(policy: Any) -> None:
  """Raise unless the three scales of a policy are valid and in order."""
  for name in _SCALE_FIELDS:
    check_scale(name, getattr(policy, name))
  bounds = policy.min_scale, policy.init_scale, policy.max_scale
  if any(isinstance(bound, jax.core.Tracer) for bound in bounds):
    return
  if not bounds[0] <= bounds[1] <= bounds[2]:
    raise ValueError(
      "Scales must satisfy min_scale <= init_scale <= max_scale, got"
      " min_scale = {!r}, init_scale = {!r} and max_scale = {!r}.".format(
        *bounds
      )
    )


def check_power_of_two_fields(policy: Any) -> None:
  """Raise unless the three scales are powers of two, valid and in order."""
  check_scale_fields(policy)
  for name in _SCALE_FIELDS:
    value = getattr(policy, name)
    is_traced = isinstance(value, jax.core.Tracer)
    if not is_traced and math.frexp(float(value))[0] != 0.5:
      raise ValueError(
        f"{name} must be a power of two, got {name} = {value!r}."
      )


def convert_arrays_to_scalars(policy: Any) -> None:
  """Replace array hyperparameters of a frozen policy by Python numbers.

  An array hyperparameter would become a buffer of the state, and a jitted step
  that donates its state would delete it. Traced hyperparameters are kept.
  """
  for name, value in vars(policy).copy().items():
    if hasattr(value, "item") and not isinstance(value, jax.core.Tracer):
      object.__setattr__(policy, name, value.item())


def check_callable(
  name: str, value: Any, expected: str = "a function", hint: str = ""
) -> None:
  """Raise unless value is callable."""
  if not callable(value):
    raise TypeError(
      f"{name} must be {expected}, got {describe_arg(name, value)}.{hint}"
    )


def describe_arg(name: str, value: Any) -> str:
  """Return "name = value", or the name and the type if the value is long."""
  if sum(getattr(x, "size", 1) for x in jax.tree.leaves(value)) < 10:
    formatted = f"{name} = {value!r}"
    if len(formatted) <= 80 and "\n" not in formatted:
      return formatted
  return f"{name} of type {type(value).__name__}"


def as_float_dtype(dtype: Any, max_bits: int = 64) -> Any:
  """Return the dtype as a NumPy dtype; raise unless it is a float dtype."""
  try:
    # jnp.dtype(None) would be float64.
    as_dtype = None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    as_dtype = None
  if (
    as_dtype is None
    or not jnp.issubdtype(as_dtype, jnp.floating)
    or jnp.finfo(as_dtype).bits > max_bits
  ):
    raise TypeError(
      f"dtype must be a float dtype of at most {max_bits} bits, such as"
      f" jnp.float16, got dtype = {dtype!r}."
    )
  return as_dtype


def format_range(low: float, high: float, *, integer: bool = False) -> str:
  """Return "a number in [low, high]" for an error message."""
  noun = "an integer" if integer else "a number"
  return f"{noun} in [{format_bound(low)}, {format_bound(high)}]"


def format_bound(value: float) -> str:
  """Format a bound for an error message: 2**126, 0.5 or 2147483647."""
  exponent = round(math.log2(value)) if value > 0 else 0
  if abs(exponent) > 20 and value == 2.0**exponent:
    return f"2**{exponent}"
  return str(value) if isinstance(value, int) else f"{value:.8g}"
