"""Which operations are at risk in a small dtype, and why."""

import math
import re

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _known, _walk

# A sum of more terms than this is long. Even 256 terms of 256 are too much for
# float16.
_LONG = 256

_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_OVER_DEVICES = {"psum", "psum_invariant", "reduce_scatter"}
# Nobody adds or divides by zero or inf on purpose.
_NEVER_ON_PURPOSE = {"add", "sub", "div"}

_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def risks_of(step: _walk.Step, dtype: np.dtype) -> list[str]:
  """Why an operation is at risk in this dtype.

  Args:
    step: the operation, and what is known of the variables around it.
    dtype: the dtype; an operation in another one is not at risk.

  Returns:
    The reasons; none if it is not at risk.
  """
  kinds = [getattr(v.aval, "dtype", None) for v in step.eqn.outvars]
  if step.runs_others or dtype not in kinds:
    return []
  reasons = [
    _of_function(step, dtype),
    _of_sum(step, dtype),
    *_of_constants(step, dtype),
  ]
  return [reason for reason in reasons if reason]


def _of_function(step: _walk.Step, dtype: np.dtype) -> str:
  name = step.eqn.primitive.name
  if name in _EXPONENTIALS:
    top = math.log(float(jnp.finfo(dtype).max))
    return f"an exponential, which is inf above {top:.3g}"
  if name in _LOGARITHMS:
    return "a logarithm, which is -inf of what was flushed to zero"
  if name in _POWERS:
    return "a power, which doubles the distance from 1 or more"
  if name == "div":
    divisor = step.known.number(step.eqn.invars[1])
    is_safe = divisor is not None and 1 <= abs(divisor) < math.inf
    return "" if is_safe else "a division, maybe by what was flushed to zero"
  return ""


def _of_sum(step: _walk.Step, dtype: np.dtype) -> str:
  name = step.eqn.primitive.name
  if name in _OVER_DEVICES:
    return f"a sum over devices in {dtype}"
  terms = _known.terms_in_sum(step.eqn)
  if name == "convert_element_type":
    terms = step.known.terms(step.eqn.invars[0])
  return f"a sum of {terms} terms" if terms > _LONG else ""


def _of_constants(step: _walk.Step, dtype: np.dtype) -> list[str]:
  name = step.eqn.primitive.name
  reasons = []
  for var in step.eqn.invars:
    number = step.known.number(var)
    if number is None:
      continue
    becomes = _in_dtype(number, dtype)
    if name == "convert_element_type":
      if becomes != number and _is_lost(becomes):
        reasons.append(f"the constant {number:g}, which becomes {becomes:g}")
    elif isinstance(var, core.Literal) and _is_lost(number):
      # JAX has converted it already. Only the line can tell what it was.
      written = _lost_on_line(step.place.line, dtype, number)
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
