"""Which operations are at risk in a small dtype, and why."""

from collections.abc import Callable
import math
import re
from typing import Any

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs

# A sum of more terms than this is long. Even 256 terms of 256 are too much for
# float16.
_LONG = 256

_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_SUMS = {"reduce_sum", "reduce_window_sum", "reduce_prod"}
_CUMULATIVE = {"cumsum", "cumprod", "cumlogsumexp"}
_OVER_DEVICES = {"psum", "psum_invariant", "reduce_scatter"}
# Nobody adds or divides by zero or inf on purpose.
_NEVER_ON_PURPOSE = {"add", "sub", "div"}

_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")

Number = Callable[[Any], float | None]


def risks_of(
  eqn: core.JaxprEqn,
  dtype: np.dtype,
  line: _jaxprs.Line | None,
  number_of: Number,
  terms_of: Callable[[Any], int],
) -> list[str]:
  """Why an operation is at risk in this dtype.

  Args:
    eqn: the equation.
    dtype: the dtype; an operation in another one is not at risk.
    line: the user's line, on which constants are looked up.
    number_of: the number that an input is, if it is a constant.
    terms_of: how many terms an input is the sum of, if it is a sum; else 1.

  Returns:
    The reasons; none if it is not at risk.
  """
  kinds = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
  if dtype not in kinds:
    return []
  name = eqn.primitive.name
  reasons = [
    _of_function(eqn, name, dtype, number_of),
    _of_sum(eqn, name, dtype, terms_of),
    *_of_constants(eqn, name, dtype, line, number_of),
  ]
  return [reason for reason in reasons if reason]


def _of_function(
  eqn: core.JaxprEqn, name: str, dtype: np.dtype, number_of: Number
) -> str:
  if name in _EXPONENTIALS:
    top = math.log(float(jnp.finfo(dtype).max))
    return f"an exponential, which is inf above {top:.3g}"
  if name in _LOGARITHMS:
    return "a logarithm, which is -inf of what was flushed to zero"
  if name in _POWERS:
    return "a power, which doubles the distance from 1 or more"
  if name == "div":
    divisor = number_of(eqn.invars[1])
    is_safe = divisor is not None and 1 <= abs(divisor) < math.inf
    return "" if is_safe else "a division, maybe by what was flushed to zero"
  return ""


def _of_sum(
  eqn: core.JaxprEqn,
  name: str,
  dtype: np.dtype,
  terms_of: Callable[[Any], int],
) -> str:
  if name in _OVER_DEVICES:
    return f"a sum over devices in {dtype}"
  terms = terms_in_sum(eqn)
  if name == "convert_element_type":
    terms = terms_of(eqn.invars[0])
  if terms <= _LONG:
    return ""
  return f"a sum of {terms} terms"


def terms_in_sum(eqn: core.JaxprEqn) -> int:
  """How many terms each result of an operation is the sum of."""
  name = eqn.primitive.name
  shape = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
  if name == "reduce_window_sum":
    return math.prod(eqn.params.get("window_dimensions", ()))
  if name in _CUMULATIVE and "axis" in eqn.params:
    return shape[eqn.params["axis"]]
  axes = eqn.params.get("axes", ()) if name in _SUMS else ()
  return math.prod(shape[axis] for axis in axes)


def _of_constants(
  eqn: core.JaxprEqn,
  name: str,
  dtype: np.dtype,
  line: _jaxprs.Line | None,
  number_of: Number,
) -> list[str]:
  reasons = []
  for var in eqn.invars:
    number = number_of(var)
    if number is None:
      continue
    becomes = _in_dtype(number, dtype)
    if name == "convert_element_type":
      if becomes != number and _is_lost(becomes):
        reasons.append(f"the constant {number:g}, which becomes {becomes:g}")
    elif isinstance(var, core.Literal) and _is_lost(number):
      # JAX has converted it already. Only the line can tell what it was.
      written = _lost_on_line(line, dtype, number)
      if written:
        reasons.append(f"the constant {written}, which becomes {number:g}")
      elif name in _NEVER_ON_PURPOSE:
        reasons.append(f"a constant that is {number:g}, maybe only in {dtype}")
  return reasons


def _in_dtype(number: float, dtype: np.dtype) -> float:
  with np.errstate(all="ignore"):
    return float(np.asarray(number).astype(dtype))


def _is_lost(number: float) -> bool:
  return number == 0 or math.isinf(number)


def _lost_on_line(
  line: _jaxprs.Line | None, dtype: np.dtype, number: float
) -> str:
  """The number on a line that this dtype makes zero or infinite."""
  for written in _NUMBER.findall(line.text if line else ""):
    becomes = _in_dtype(float(written), dtype)
    if float(written) != becomes == abs(number):
      return written
  return ""
