"""Checks of numbers and dtypes, and how messages write them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

# Between these two, the scale and its reciprocal are both normal float32
# numbers. The reciprocal of 2**127 is subnormal, and XLA flushes it to zero:
# every unscaled gradient would be zero, and nothing would show it.
MIN_LOSS_SCALE = 2.0**-126
MAX_LOSS_SCALE = 2.0**126

# The float32 numbers next to 1. A factor nearer to 1 would be rounded to 1, and
# the scale would never move.
MIN_GROWTH_FACTOR = 1 + 2**-23
MAX_BACKOFF_FACTOR = 1 - 2**-24

# The largest int32, since all counters are int32.
MAX_COUNT = 2**31 - 1

_SCALE_FIELDS = (
  "init_scale",
  "min_scale",
  "max_scale",
)  # of each policy that moves


def check_number(
  name: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
  """Raises unless ``value`` is a number in [low, high]; traced ones pass."""
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
  in_range = low <= value <= high  # False for NaN, too.
  if not in_range or (integer and value != int(value)):
    raise ValueError(f"{requirement}, got {name} = {value!r}.")


def check_scale(name: str, value: Any) -> None:
  """Raises unless ``value`` is a loss scale, or traced."""
  check_number(name, value, MIN_LOSS_SCALE, MAX_LOSS_SCALE)


def check_count(name: str, value: Any) -> None:
  """Raises unless ``value`` is a positive int32, or traced."""
  check_number(name, value, 1, MAX_COUNT, integer=True)


def check_scale_fields(policy: Any) -> None:
  """Raises unless the three scales of a policy are such, and in order."""
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
  """Raises unless the three scales of a policy are powers of two, in order."""
  check_scale_fields(policy)
  for name in _SCALE_FIELDS:
    value = getattr(policy, name)
    is_traced = isinstance(value, jax.core.Tracer)
    if not is_traced and math.frexp(float(value))[0] != 0.5:
      raise ValueError(
        f"{name} must be a power of two, got {name} = {value!r}."
      )


def convert_arrays_to_scalars(policy: Any) -> None:
  """Makes Python numbers of the arrays that a policy was given, once checked.

  As an array, one would become a buffer of the state, and be deleted with it by
  a step that donates its state. Traced ones stay.
  """
  for name, value in vars(policy).copy().items():
    if hasattr(value, "item") and not isinstance(value, jax.core.Tracer):
      object.__setattr__(policy, name, value.item())


def check_callable(
  name: str, value: Any, expected: str = "a function", hint: str = ""
) -> None:
  """Raises unless ``value`` can be called."""
  if not callable(value):
    raise TypeError(
      f"{name} must be {expected}, got {describe_arg(name, value)}.{hint}"
    )


def describe_arg(name: str, value: Any) -> str:
  """``name = value`` for a message, or its type if that is more than a line."""
  if sum(getattr(x, "size", 1) for x in jax.tree.leaves(value)) < 10:
    formatted = f"{name} = {value!r}"
    if len(formatted) <= 80 and "\n" not in formatted:
      return formatted
  return f"{name} of type {type(value).__name__}"


def as_float_dtype(dtype: Any) -> Any:
  """The dtype, however it is written; raises unless it is a float dtype."""
  try:
    # NumPy takes None for float64.
    as_dtype = None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    as_dtype = None
  if as_dtype is None or not jnp.issubdtype(as_dtype, jnp.floating):
    raise TypeError(
      f"dtype must be a float dtype such as jnp.float16, got dtype = {dtype!r}."
    )
  return as_dtype


def format_range(low: float, high: float, *, integer: bool = False) -> str:
  """The rule for a number within bounds, as messages give it."""
  noun = "an integer" if integer else "a number"
  return f"{noun} in [{format_bound(low)}, {format_bound(high)}]"


def format_bound(value: float) -> str:
  """A bound as people write it: ``2**126``, ``0.5``, ``2147483647``."""
  exponent = round(math.log2(value)) if value > 0 else 0
  if abs(exponent) > 20 and value == 2.0**exponent:
    return f"2**{exponent}"
  return str(value) if isinstance(value, int) else f"{value:.8g}"
