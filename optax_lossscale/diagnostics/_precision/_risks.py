"""Which operations are at risk in a small dtype, and why."""

from collections.abc import Iterator
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


def risks_of(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  """Why an operation is at risk in this dtype.

  Args:
    step: the operation, and what is known of the variables around it.
    dtype: the dtype; an operation in another one is not at risk.

  Yields:
    The reasons; none if it is not at risk.
  """
  kinds = [getattr(v.aval, "dtype", None) for v in step.eqn.outvars]
  if dtype in kinds and not step.runs_others:
    yield from _of_function(step, dtype)
    yield from _of_sum(step, dtype)
    yield from _of_constants(step, dtype)


def _of_function(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  name = step.eqn.primitive.name
  if name in _EXPONENTIALS:
    top = math.log(float(jnp.finfo(dtype).max))
    yield f"an exponential, which is inf above {top:.3g}"
  elif name in _LOGARITHMS:
    yield "a logarithm, which is -inf of what was flushed to zero"
  elif name in _POWERS:
    yield "a power, which doubles the distance from 1 or more"
  elif name == "div":
    divisor = step.body.known.number(step.eqn.invars[1])
    if divisor is None or not 1 <= abs(divisor) < math.inf:
      yield "a division, maybe by what was flushed to zero"


def _of_sum(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  name = step.eqn.primitive.name
  terms = _known.terms_in_sum(step.eqn)
  if name == "convert_element_type":
    terms = step.body.known.terms(step.eqn.invars[0])
  if name in _OVER_DEVICES:
    yield f"a sum over devices in {dtype}"
  elif terms > _LONG:
    yield f"a sum of {terms} terms"


def _of_constants(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  name = step.eqn.primitive.name
  for var in step.eqn.invars:
    number = step.body.known.number(var)
    if number is None:
      continue
    becomes = _in_dtype(number, dtype)
    if name == "convert_element_type":
      if becomes != number and _is_lost(becomes):
        yield f"the constant {number:g}, which becomes {becomes:g}"
    elif isinstance(var, core.Literal) and _is_lost(number):
      # JAX has converted it already. Only the line can tell what it was.
      written = _lost_on_line(step.place.line, dtype, number)
      if written:
        yield f"the constant {written}, which becomes {number:g}"
      elif name in _NEVER_ON_PURPOSE:
        yield f"a constant that is {number:g}, maybe only in {dtype}"


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
