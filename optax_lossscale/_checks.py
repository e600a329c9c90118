"""Checks of numbers and dtypes, and how messages write them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

# Between these two, the scale and its reciprocal are both normal float32
# numbers. The reciprocal of 2**127 is subnormal, and XLA flushes it to zero:
# every unscaled gradient would be zero, and nothing would show it.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

# The float32 numbers next to 1. A factor nearer to 1 would be rounded to 1, and
# the scale would never move.
SMALLEST_GROWTH = 1 + 2**-23
LARGEST_BACKOFF = 1 - 2**-24

# The largest int32, since all counters are int32.
LARGEST_COUNT = 2**31 - 1

_SCALES = "init_scale", "min_scale", "max_scale"  # of each policy that moves


def check_number(
  name: str, value: Any, low: float, high: float, *, integer: bool = False
) -> None:
  """Raises unless ``value`` is a number in [low, high]; traced ones pass."""
  if isinstance(value, jax.core.Tracer):
    return
  rule = f"{name} must be {range_rule(low, high, integer=integer)}"
  is_number = isinstance(value, (int, float)) or (
    hasattr(value, "dtype") and getattr(value, "shape", None) == ()
  )
  if isinstance(value, (bool, complex)) or not is_number:
    raise TypeError(f"{rule}, got {came(name, value)}.")
  if hasattr(value, "dtype"):
    if value.dtype == bool or jnp.issubdtype(value.dtype, jnp.complexfloating):
      raise TypeError(f"{rule}, got {name} = {value!r}.")
    value = value.item()
  in_range = low <= value <= high  # False for NaN, too.
  if not in_range or (integer and value != int(value)):
    raise ValueError(f"{rule}, got {name} = {value!r}.")


def check_scale(name: str, value: Any) -> None:
  """Raises unless ``value`` is a loss scale, or traced."""
  check_number(name, value, SMALLEST_SCALE, LARGEST_SCALE)


def check_count(name: str, value: Any) -> None:
  """Raises unless ``value`` is a positive int32, or traced."""
  check_number(name, value, 1, LARGEST_COUNT, integer=True)


def check_scales(policy: Any) -> None:
  """Raises unless the three scales of a policy are such, and in order."""
  for name in _SCALES:
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


def check_powers_of_two(policy: Any) -> None:
  """Raises unless the three scales of a policy are powers of two, in order."""
  check_scales(policy)
  for name in _SCALES:
    value = getattr(policy, name)
    is_traced = isinstance(value, jax.core.Tracer)
    if not is_traced and math.frexp(float(value))[0] != 0.5:
      raise ValueError(
        f"{name} must be a power of two, got {name} = {value!r}."
      )


def keep_numbers(policy: Any) -> None:
  """Makes Python numbers of the arrays that a policy was given, once checked.

  As an array, one would become a buffer of the state, and be deleted with it by
  a step that donates its state. Traced ones stay.
  """
  for name, value in vars(policy).copy().items():
    if hasattr(value, "item") and not isinstance(value, jax.core.Tracer):
      object.__setattr__(policy, name, value.item())


def check_callable(
  name: str, value: Any, kind: str = "a function", hint: str = ""
) -> None:
  """Raises unless ``value`` can be called."""
  if not callable(value):
    raise TypeError(f"{name} must be {kind}, got {came(name, value)}.{hint}")


def came(name: str, value: Any) -> str:
  """``name = value`` for a message, or its type if that is more than a line."""
  if sum(getattr(x, "size", 1) for x in jax.tree.leaves(value)) < 10:
    text = f"{name} = {value!r}"
    if len(text) <= 80 and "\n" not in text:
      return text
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


def range_rule(low: float, high: float, *, integer: bool = False) -> str:
  """The rule for a number within bounds, as messages give it."""
  kind = "an integer" if integer else "a number"
  return f"{kind} in [{show_bound(low)}, {show_bound(high)}]"


def show_bound(value: float) -> str:
  """A bound as people write it: ``2**126``, ``0.5``, ``2147483647``."""
  exponent = round(math.log2(value)) if value > 0 else 0
  if abs(exponent) > 20 and value == 2.0**exponent:
    return f"2**{exponent}"
  return str(value) if isinstance(value, int) else f"{value:.8g}"
