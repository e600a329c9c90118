"""Operations that may overflow or underflow in a dtype, by their equation.

Nothing is run: functions with a narrow range, long sums, and constants that the
dtype does not hold.
"""

from collections.abc import Iterator, Sequence
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _higher_order, _primitives, _walk
from optax_lossscale.diagnostics import _dtype_limits

# A sum of more terms than this is long: 256 terms of 256 already overflow
# float16.
_LONG_SUM_TERMS = 256
_LOGARITHMS = {"log", "log2"}
_POWERS = {"integer_pow", "pow", "rsqrt", "square"}
_REDUCING_COLLECTIVES = {"psum", "psum_invariant", "reduce_scatter"}
# A literal of zero or inf in these is suspicious: it was probably another
# number before a cast.
_SUSPICIOUS_LITERAL_PRIMITIVES = {"add", "sub", "div"}


def find_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "ConstantPropagation"
) -> Iterator[str]:
  """Yield the risks of an operation, if it has a result in this dtype."""
  out_dtypes = [getattr(v.aval, "dtype", None) for v in visit.eqn.outvars]
  if dtype in out_dtypes:
    yield from _find_function_risks(visit, dtype, constants)
    yield from _find_sum_risks(visit, dtype, constants)
    yield from _find_constant_cast_risks(visit, dtype, constants)


def _find_function_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "ConstantPropagation"
) -> Iterator[str]:
  name = visit.eqn.primitive.name
  if name in _dtype_limits.OVERFLOW_THRESHOLDS:
    threshold = _dtype_limits.format_overflow_threshold(name, dtype)
    yield f"{name} overflows above {threshold}"
  elif name in _LOGARITHMS:
    yield f"{name} of an underflowed value is -inf"
  elif name in _POWERS:
    yield "power: may overflow or underflow (squaring doubles the exponent)"
  elif name == "div":
    divisor = constants.get_constant(visit, visit.eqn.invars[1])
    # A constant divisor of at least 1 cannot underflow in the cast.
    if divisor is None or not 1 <= abs(divisor) < math.inf:
      yield "division: the divisor may have underflowed to zero"


def _find_sum_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "ConstantPropagation"
) -> Iterator[str]:
  # jnp.sum of float16 adds up in float32, and then casts. The cast has the
  # risk: its operand is the sum.
  sum_eqn = visit.eqn
  if visit.eqn.primitive.name == "convert_element_type":
    sum_eqn = constants.get_defining_eqn(visit, visit.eqn.invars[0]) or sum_eqn
  num_terms = _primitives.count_summands(sum_eqn)
  if visit.eqn.primitive.name in _REDUCING_COLLECTIVES:
    yield f"sum over devices in {dtype}"
  elif (
    num_terms > _LONG_SUM_TERMS
    and sum_eqn.primitive.name in _primitives.SCATTER_REDUCTIONS
  ):
    yield f"sum by index of up to {num_terms} terms"
  elif num_terms > _LONG_SUM_TERMS:
    yield f"sum of {num_terms} terms"


def _find_constant_cast_risks(
  visit: _walk.EqnVisit, dtype: np.dtype, constants: "ConstantPropagation"
) -> Iterator[str]:
  name = visit.eqn.primitive.name
  for atom in visit.eqn.invars:
    value = constants.get_constant(visit, atom)
    if value is None:
      continue
    with np.errstate(all="ignore"):
      cast_value = float(np.asarray(value).astype(dtype))
    is_zero_or_inf = cast_value == 0 or math.isinf(cast_value)
    if (
      name == "convert_element_type" and cast_value != value and is_zero_or_inf
    ):
      yield f"constant {value:g} becomes {cast_value:g} in {dtype}"
    # JAX has cast the literal before tracing, so its original value is unknown.
    is_literal = isinstance(atom, core.Literal)
    if name in _SUSPICIOUS_LITERAL_PRIMITIVES and is_literal and is_zero_or_inf:
      verb = "underflowed" if cast_value == 0 else "overflowed"
      yield (f"constant is {value:g}; it may have {verb} when cast to {dtype}")


class ConstantPropagation:
  """Finds the values in a jaxpr that are constant scalars, without running it.

  A value is constant if it is a literal, a constant of the jaxpr, a broadcast
  of a constant, or an input to which the caller passes a constant each time.
  """

  def __init__(self) -> None:
    self._defining_eqns: dict[core.Jaxpr, dict[Any, core.JaxprEqn]] = {}

  def get_constant(self, visit: _walk.EqnVisit, atom: Any) -> float | None:
    """Return the number that all entries of an operand are; None if unknown."""
    if isinstance(atom, core.Literal):
      return _as_float_scalar(atom.val)
    defining_eqn, jaxpr = (
      self.get_defining_eqn(visit, atom),
      visit.closed_jaxpr.jaxpr,
    )
    if defining_eqn is not None:
      is_broadcast = defining_eqn.primitive.name in _primitives.BROADCASTING
      return (
        self.get_constant(visit, defining_eqn.invars[0])
        if is_broadcast
        else None
      )
    if atom in jaxpr.constvars:
      return _as_float_scalar(
        visit.closed_jaxpr.consts[jaxpr.constvars.index(atom)]
      )
    operand_by_var = dict(
      zip(jaxpr.invars, _body_operands(visit), strict=False)
    )
    operand = operand_by_var.get(atom)
    if visit.parent is None or operand is None:
      return None
    return self.get_constant(visit.parent, operand)

  def get_defining_eqn(
    self, visit: _walk.EqnVisit, atom: Any
  ) -> core.JaxprEqn | None:
    """Return the eqn whose first output is this operand, or None."""
    jaxpr = visit.closed_jaxpr.jaxpr
    if jaxpr not in self._defining_eqns:
      self._defining_eqns[jaxpr] = {
        v: eqn for eqn in jaxpr.eqns for v in eqn.outvars[:1]
      }
    is_literal = isinstance(atom, core.Literal)
    return None if is_literal else self._defining_eqns[jaxpr].get(atom)


def _body_operands(visit: _walk.EqnVisit) -> Sequence[Any]:
  """Return the parent's operand for each input of the jaxpr of a visit.

  It is None for the carry of a loop, which changes. If the parent is unknown,
  the result is empty.
  """
  parent = visit.parent
  if parent is None or parent.hop is None:
    return ()
  operands = _higher_order.mask_carry(parent.hop, parent.eqn.invars)
  bodies = _higher_order.pair_bodies_with_inputs(parent.hop, operands)
  _, body_operands = bodies[visit.body_index]
  return body_operands


def _as_float_scalar(const: Any) -> float | None:
  """Return a real scalar as a Python float; None for other constants."""
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over tracers of the surrounding function.
  is_float = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_float and jnp.shape(const) == () else None
