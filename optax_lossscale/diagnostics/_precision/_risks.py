"""Which operations are at risk in a small dtype, and why."""

from collections.abc import Iterator
import math

from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _walk

# A sum of more terms than this is long. Even 256 terms of 256 are too much for
# float16.
_LONG = 256

_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_OVER_DEVICES = {"psum", "psum_invariant", "reduce_scatter"}
# Nobody adds or divides by zero or inf on purpose.
_NEVER_ON_PURPOSE = {"add", "sub", "div"}


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
    divisor = step.body.number(step.eqn.invars[1])
    if divisor is None or not 1 <= abs(divisor) < math.inf:
      yield "a division, maybe by what was flushed to zero"


def _of_sum(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  name = step.eqn.primitive.name
  terms = _jaxprs.terms_in_sum(step.eqn)
  if name == "convert_element_type":
    terms = step.body.terms(step.eqn.invars[0])
  if name in _OVER_DEVICES:
    yield f"a sum over devices in {dtype}"
  elif terms > _LONG:
    yield f"a sum of {terms} terms"


def _of_constants(step: _walk.Step, dtype: np.dtype) -> Iterator[str]:
  name = step.eqn.primitive.name
  for atom in step.eqn.invars:
    number = step.body.number(atom)
    if number is None:
      continue
    with np.errstate(all="ignore"):
      becomes = float(np.asarray(number).astype(dtype))
    is_lost = becomes == 0 or math.isinf(becomes)
    if name == "convert_element_type" and becomes != number and is_lost:
      yield f"the constant {number:g}, which becomes {becomes:g}"
    # JAX has converted it already, and what it was nobody knows.
    is_literal = isinstance(atom, core.Literal)
    if name in _NEVER_ON_PURPOSE and is_literal and is_lost:
      yield f"a constant that is {number:g}, maybe only in {dtype}"
