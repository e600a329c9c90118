"""Writes the warnings of `autocast` about matmuls that stay in float32."""

from collections.abc import Callable, Set
from typing import Any

from jax.extend import core

from optax_lossscale._autocast import _matmuls
from optax_lossscale._jaxprs import (
  _eqns,
  _primitives,
  _provenance,
  _source_info,
  _walk,
)

_MAX_LISTED = 3


def describe_unentered(
  closed_jaxpr: _eqns.ClosedJaxpr,
  unentered_eqns: Set[core.JaxprEqn],
  dtype: Any,
) -> str:
  """Return the warning about matmuls that autocast could not rewrite.

  Args:
    closed_jaxpr: the jaxpr before the rewrite.
    unentered_eqns: the equations that can't be rewritten. Some may contain no
      matmul, but a rule that may contain matmuls.
    dtype: the half precision.

  Returns:
    The warning; empty if no equation contains a matmul.
  """
  if not unentered_eqns:
    return ""
  search = _matmuls.MatmulSearch(dtype)
  locations = list(
    dict.fromkeys(
      _provenance.format_location(
        _source_info.get_primitive_name(visit.eqn), visit.location.source_line
      )
      for visit in _walk.walk(closed_jaxpr, _matmuls.subjaxprs_to_search)
      if visit.eqn in unentered_eqns
      and (
        _matmuls.has_exported_matmul(visit.eqn) or search.any_inside(visit.eqn)
      )
    )
  )
  if not locations:
    return ""
  listed = ", ".join(locations[:_MAX_LISTED])
  if len(locations) > _MAX_LISTED:
    listed += f" and {len(locations) - _MAX_LISTED} more"
  return (
    f"autocast left {listed} unchanged: the matmuls and convolutions inside run"
    f" in float32 instead of {dtype}. To keep them in float32 and silence this"
    " warning, wrap the function that calls them in"
    " optax_lossscale.keep_float32."
  )


def describe_nothing_cast(
  fun: Callable[..., Any], closed_jaxpr: _eqns.ClosedJaxpr, dtype: Any
) -> str:
  """Return the warning about a function without any matmul to cast.

  Args:
    fun: the function.
    closed_jaxpr: its jaxpr before the rewrite.
    dtype: the half precision.

  Returns:
    The warning, with the dtypes of the matmuls that the function contains;
    empty if one of its custom derivatives contains a matmul to cast.
  """

  # Unlike `subjaxprs_to_search`, this includes `keep_float32` functions.
  def get_subjaxprs(eqn: Any) -> list[_eqns.ClosedJaxpr]:
    subjaxprs: list[Any] = [*_eqns.subjaxprs(eqn)] or [_eqns.lower_hijax(eqn)]
    return [closed_jaxpr for closed_jaxpr in subjaxprs if closed_jaxpr]

  eqns: Any = [visit.eqn for visit in _walk.walk(closed_jaxpr, get_subjaxprs)]
  if any(_matmuls.has_rule_matmuls(eqn, dtype) for eqn in eqns):
    return ""
  matmuls = list(filter(_primitives.is_matmul, eqns))
  name = getattr(fun, "__name__", type(fun).__name__)
  if not matmuls:
    return (
      f"autocast had no effect on {name}: it contains no matmul or convolution"
      f" of JAX arrays. Pass the function whose matmuls should run in {dtype}."
    )
  labels = sorted({_format_operand_dtypes(eqn) for eqn in matmuls})
  message = (
    f"autocast had no effect on {name}: it contains no float32 matmul or"
    f" convolution that autocast may cast to {dtype}, only some in"
    f" {' and '.join(labels)}."
  )
  return message + _explain_dtypes(matmuls, str(dtype))


def _format_operand_dtypes(eqn: core.JaxprEqn) -> str:
  """Return ``float32``, or ``float32 @ bfloat16`` if the operands differ."""
  return " @ ".join(dict.fromkeys(map(str, _matmuls.get_operand_dtypes(eqn))))


def _explain_dtypes(matmuls: list[core.JaxprEqn], dtype: str) -> str:
  """Explain why autocast casts none of some matmuls.

  Args:
    matmuls: the matmuls.
    dtype: the half precision.

  Returns:
    A sentence for each reason, after a space; empty if no reason is known.
  """
  operand_dtypes = [
    set(map(str, _matmuls.get_operand_dtypes(eqn))) for eqn in matmuls
  ]
  explanation = ""
  if any("float32" in x and x <= {"float32", dtype} for x in operand_dtypes):
    explanation += (
      " Matmuls of precision HIGHEST, also by jax.default_matmul_precision, and"
      " matmuls marked with keep_float32 stay in float32."
    )
  if any(x <= {"bfloat16", "float16"} for x in operand_dtypes):
    explanation += (
      " A model that already computes in half precision needs no autocast."
    )
  # The result of a complex or float64 operand is not float32.
  if any(
    "float32" in x
    and not x <= {"float32", dtype}
    and _matmuls.has_float32_result(eqn)
    for eqn, x in zip(matmuls, operand_dtypes, strict=True)
  ):
    explanation += (
      " If one operand is float32 and the other one neither float32 nor"
      f" {dtype}, the matmul is unchanged. Cast the other operand to float32."
    )
  return explanation
