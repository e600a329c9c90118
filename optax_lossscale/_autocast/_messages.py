"""Writes the warnings of `autocast`, and counts its calls outside ``jit``."""

import collections
from collections.abc import Callable, Set
import functools
import inspect
from typing import Any
import weakref

import jax
from jax.extend import core

from optax_lossscale._autocast import _matmuls
from optax_lossscale._jaxprs import (
  _avals,
  _eqns,
  _primitives,
  _provenance,
  _source_info,
  _walk,
)

# One or two calls outside `jit` are normal in interactive use.
_WARN_AT_CALL = 3

# The number of calls for each code object and the shapes of its arguments. The
# code object is the key instead of the function, because a training loop may
# create its loss function in each step. The reference is weak, so that neither
# functions nor the arrays in their closures are kept alive.
_call_counts: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = (
  weakref.WeakKeyDictionary()
)
_MAX_LISTED = 3
# The label under which the FLOPs of matmuls in half precision are counted.
_REWRITTEN_LABEL = ""


def describe_unentered(
  closed_jaxpr: _eqns.ClosedJaxpr,
  unentered_eqns: Set[core.JaxprEqn],
  dtype: Any,
) -> str:
  """Return the warning about matmuls that autocast could not rewrite.

  Args:
    closed_jaxpr: the jaxpr before the rewrite.
    unentered_eqns: the equations that contain matmuls but can't be rewritten.
    dtype: the half precision.

  Returns:
    The warning; empty if there are no such equations.
  """
  if not unentered_eqns:
    return ""
  flops_fractions, exported_locations = _flops_by_location(
    closed_jaxpr, unentered_eqns, dtype
  )
  sentences = []
  if flops_fractions:
    largest = sorted(
      flops_fractions, key=lambda location: -flops_fractions[location]
    )
    sentences.append(
      f"autocast left {_join_truncated(largest)} unchanged: the matmuls and"
      f" convolutions inside ({sum(flops_fractions.values()):.1%} of the"
      " matmul FLOPs)"
      f" run in float32 instead of {dtype}. To keep them in float32 and silence"
      " this warning, wrap the function that calls them in"
      " optax_lossscale.keep_float32."
    )
  if exported_locations:
    sentences.append(
      f"autocast left {_join_truncated(exported_locations)} unchanged:"
      " the matmuls and"
      " convolutions of an exported function run in float32. To keep them in"
      " float32 and silence this warning, wrap the function that calls it in"
      " optax_lossscale.keep_float32."
    )
  return " ".join(sentences)


def describe_nothing_cast(
  fun: Callable[..., Any], thunk: Callable[[], Any], dtype: Any
) -> str:
  """Return the warning about a function without any matmul to cast.

  Args:
    fun: the function.
    thunk: the call of the function, without arguments.
    dtype: the half precision.

  Returns:
    The warning, with the dtypes of the matmuls that the function contains;
    empty if one of its custom derivatives contains a matmul to cast.
  """

  # Unlike `subjaxprs_to_search`, this includes `keep_float32` functions.
  def get_subjaxprs(eqn: Any) -> list[_eqns.ClosedJaxpr]:
    subjaxprs: list[Any] = [*_eqns.subjaxprs(eqn)] or [_eqns.lower_hijax(eqn)]
    return [closed_jaxpr for closed_jaxpr in subjaxprs if closed_jaxpr]

  # The caller has only the rewritten jaxpr, so the function is traced again.
  # This is slow, but happens only for a warning.
  def flat_fun() -> list[Any]:
    leaves = jax.tree.leaves(thunk())
    return [x for x in leaves if isinstance(x, jax.core.Tracer)]

  closed_jaxpr = jax.make_jaxpr(flat_fun)()
  eqns: Any = [visit.eqn for visit in _walk.walk(closed_jaxpr, get_subjaxprs)]
  if any(_matmuls.has_rule_matmuls(eqn, dtype) for eqn in eqns):
    return ""
  matmuls = list(filter(_primitives.is_matmul, eqns))
  name = getattr(fun, "__name__", type(fun).__name__)
  if not matmuls:
    return (
      f"autocast had no effect on {name}: it contains no matmul or convolution."
      f" Pass the function whose matmuls should run in {dtype}."
    )
  labels = sorted({_format_operand_dtypes(eqn) for eqn in matmuls})
  message = (
    f"autocast had no effect on {name}: it contains no float32 matmul or"
    f" convolution that autocast may cast to {dtype}, only some in"
    f" {' and '.join(labels)}."
  )
  return message + _explain_dtypes(matmuls, str(dtype))


def describe_unjitted_calls(
  fun: Callable[..., Any], inputs: Any, out: Any
) -> str:
  """Count a call outside ``jit``, and return the warning at the third one.

  Args:
    fun: the function.
    inputs: the arguments of the call.
    out: the output of the call. Concrete arrays show that no ``jit`` or other
      transformation traces the call.

  Returns:
    The warning at the third call with the same shapes; empty at all others.
  """
  arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
  # With `jax.disable_jit()`, the user runs without `jit` on purpose.
  if jax.config.jax_disable_jit or not arrays:
    return ""
  if not all(map(_avals.is_concrete, arrays)):
    return ""
  if _count_call(fun, (inputs, out)) != _WARN_AT_CALL:
    return ""
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"autocast ran {name} outside of jit for the third time with the same"
    " shapes. Each call traces it again, runs its operations one by one and"
    f" recompiles the functions that are jitted inside. Call {name} in a jitted"
    " function, such as the training step."
  )


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


def _flops_by_location(
  closed_jaxpr: _eqns.ClosedJaxpr,
  unentered_eqns: Set[core.JaxprEqn],
  dtype: Any,
) -> tuple[dict[str, float], list[str]]:
  """Count the FLOPs of matmuls that autocast could not rewrite.

  Args:
    closed_jaxpr: the jaxpr before the rewrite.
    unentered_eqns: the equations that contain matmuls but can't be rewritten.
    dtype: the half precision.

  Returns:
    For each location of such an equation, its fraction of the FLOPs of all
    matmuls; and the locations of exported functions, whose FLOPs are unknown.
  """
  flops: dict[str, int] = {}
  exported_locations: dict[str, None] = {}
  for visit in _walk.walk(closed_jaxpr, _matmuls.subjaxprs_to_search):
    if _matmuls.has_exported_matmul(visit.eqn):
      exported_locations[_format_location(visit)] = None
    if _matmuls.is_castable_matmul(visit.eqn, dtype):
      unentered_visit = next(
        (x for x in visit.self_and_ancestors if x.eqn in unentered_eqns), None
      )
      location = (
        _format_location(unentered_visit)
        if unentered_visit
        else _REWRITTEN_LABEL
      )
      # With symbolic sizes the FLOPs are unknown, and each matmul counts as 1.
      num_flops = visit.num_executions * (
        _primitives.count_flops(visit.eqn) or 1
      )
      flops[location] = flops.get(location, 0) + num_flops
  total = sum(flops.values()) or 1  # The only loop may run for zero steps.
  flops.pop(_REWRITTEN_LABEL, None)
  return {location: n / total for location, n in flops.items()}, list(
    exported_locations
  )


def _format_location(visit: _walk.EqnVisit) -> str:
  return _provenance.format_location(
    _source_info.get_primitive_name(visit.eqn), visit.location.source_line
  )


def _join_truncated(locations: list[str]) -> str:
  joined = ", ".join(locations[:_MAX_LISTED])
  num_more = len(locations) - _MAX_LISTED
  return f"{joined} and {num_more} more" if num_more > 0 else joined


def _count_call(fun: Callable[..., Any], inputs_and_out: Any) -> int:
  """Count a call, and return the number of calls with the same shapes."""
  counts_by_shapes = _call_counts.setdefault(
    _get_code(fun), collections.Counter()
  )
  shapes_hash = _hash_shapes(inputs_and_out)
  counts_by_shapes[shapes_hash] += 1
  return counts_by_shapes[shapes_hash]


def _get_code(fun: Any) -> Any:
  """Return an object that stays the same if a function is created again."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  fun = inspect.unwrap(fun)
  # A method has the code of its function, and a callable layer has none.
  return getattr(fun, "__code__", type(fun))


def _hash_shapes(tree: Any) -> int:
  """Hash the shapes and dtypes of a tree, so that no array is kept alive."""
  try:
    leaves = jax.tree.leaves(tree)
  except (TypeError, ValueError):  # JAX can't sort the keys of a dict.
    return 0
  descriptions = [
    f"{getattr(x, 'dtype', type(x))}{getattr(x, 'shape', '')}" for x in leaves
  ]
  return hash(tuple(descriptions))
