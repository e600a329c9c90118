"""What `autocast` has to tell of what it found, and of how it is called."""

import collections
from collections.abc import Callable, Container
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

# Two calls are what one makes by hand, before and after a training, say.
_WARN_AT_CALL = 3

# How often with which shapes, by the code: a loop may make its loss anew in
# each step. The code is held weakly, and what a function holds not at all.
_call_counts: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = (
  weakref.WeakKeyDictionary()
)
_MAX_LISTED = 3
_REWRITTEN_LABEL = ""


def describe_unentered(
  closed_jaxpr: _eqns.ClosedJaxpr,
  unentered_eqns: Container[core.JaxprEqn],
  dtype: Any,
) -> str:
  """What to tell of products that were not reached; empty if all were.

  Args:
    closed_jaxpr: the jaxpr that was rewritten.
    unentered_eqns: the equations that hold products and could not be entered.
    dtype: what their products would have run in.
  """
  flops_fractions, exported_locations = _flops_by_location(
    closed_jaxpr, unentered_eqns
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
  """What to tell of a function in which nothing runs in half precision.

  Args:
    fun: the function.
    thunk: the same without arguments, to be called within a trace.
    dtype: what its products would have run in.
  """

  def get_subjaxprs(eqn: Any) -> list[_eqns.ClosedJaxpr]:
    subjaxprs: list[Any] = [*_eqns.subjaxprs(eqn)] or [_eqns.lower_hijax(eqn)]
    return [closed_jaxpr for closed_jaxpr in subjaxprs if closed_jaxpr]

  def flat_fun() -> list[Any]:
    leaves = jax.tree.leaves(thunk())
    return [x for x in leaves if isinstance(x, jax.core.Tracer)]

  closed_jaxpr = jax.make_jaxpr(flat_fun)()
  eqns: Any = [visit.eqn for visit in _walk.walk(closed_jaxpr, get_subjaxprs)]
  if any(map(_matmuls.has_rule_matmuls, eqns)):
    return ""
  matmuls = filter(_primitives.is_matmul, eqns)
  dtypes = {str(eqn.invars[0].aval.dtype) for eqn in matmuls}
  name = getattr(fun, "__name__", type(fun).__name__)
  if not dtypes:
    return (
      f"autocast had no effect on {name}: it contains no matmul or convolution."
      f" Pass the function whose matmuls should run in {dtype}."
    )
  message = (
    f"autocast had no effect on {name}: it contains no float32 matmul or"
    f" convolution that autocast may cast to {dtype}, only some in"
    f" {' and '.join(sorted(dtypes))}."
  )
  if "float32" in dtypes:
    message += (
      " Matmuls of precision HIGHEST, also by jax.default_matmul_precision, and"
      " matmuls marked with keep_float32 stay in float32."
    )
  if dtypes & {"bfloat16", "float16"}:
    message += (
      " A model that already computes in half precision needs no autocast."
    )
  return message


def describe_unjitted_calls(
  fun: Callable[..., Any], inputs: Any, out: Any
) -> str:
  """What to tell of a function that is called again and again, or nothing.

  Args:
    fun: the function.
    inputs: its arguments.
    out: what it returned: this tells whether anything compiles the call.

  Returns:
    The message at the third call with the same shapes outside of ``jit``, and
    nothing at all others.
  """
  arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
  # Who turned `jit` off wants it so.
  if jax.config.jax_disable_jit or not arrays:
    return ""
  if not all(map(_avals.is_concrete, arrays)):
    return ""
  counts_by_shapes = _call_counts.setdefault(
    _get_code(fun), collections.Counter()
  )
  shapes_hash = _hash_shapes((inputs, out))
  counts_by_shapes[shapes_hash] += 1
  if counts_by_shapes[shapes_hash] != _WARN_AT_CALL:
    return ""
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"autocast ran {name} outside of jit for the third time with the same"
    " shapes. Each call traces it again, runs its operations one by one and"
    f" recompiles the functions that are jitted inside. Call {name} in a jitted"
    " function, such as the training step."
  )


def _flops_by_location(
  closed_jaxpr: _eqns.ClosedJaxpr, unentered_eqns: Container[core.JaxprEqn]
) -> tuple[dict[str, float], list[str]]:
  """Of the places that were missed, their shares of the flops of all products.

  And those that were exported, which do not tell their flops.
  """
  flops: dict[str, int] = {}
  exported_locations: dict[str, None] = {}
  for visit in _walk.walk(closed_jaxpr, _matmuls.subjaxprs_to_search):
    if _matmuls.has_exported_matmul(visit.eqn):
      exported_locations[_format_location(visit)] = None
    if _matmuls.is_castable_matmul(visit.eqn):
      unentered_visit = next(
        (x for x in visit.ancestors if x.eqn in unentered_eqns), None
      )
      location = (
        _format_location(unentered_visit)
        if unentered_visit
        else _REWRITTEN_LABEL
      )
      num_flops = visit.num_executions * (
        _primitives.count_flops(visit.eqn) or 1
      )  # as one product
      flops[location] = flops.get(location, 0) + num_flops
  total = sum(flops.values()) or 1  # A loop may run for no step at all.
  flops.pop(_REWRITTEN_LABEL, None)
  return {location: n / total for location, n in flops.items()}, list(
    exported_locations
  )


def _format_location(visit: _walk.EqnVisit) -> str:
  return _provenance.format_location(
    _source_info.get_op_name(visit.eqn), visit.location.source_line
  )


def _join_truncated(locations: list[str]) -> str:
  joined = ", ".join(locations[:_MAX_LISTED])
  num_more = len(locations) - _MAX_LISTED
  return f"{joined} and {num_more} more" if num_more > 0 else joined


def _get_code(fun: Any) -> Any:
  """What is the same if a function, a method or a partial is made anew."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  fun = inspect.unwrap(fun)
  # Of a method or a layer: the code or the class.
  return getattr(fun, "__code__", type(fun))


def _hash_shapes(tree: Any) -> int:
  """The shapes and dtypes as one number, so that nothing is held."""
  try:
    leaves = jax.tree.leaves(tree)
  except (TypeError, ValueError):  # Its keys have no order.
    return 0
  descriptions = [
    f"{getattr(x, 'dtype', type(x))}{getattr(x, 'shape', '')}" for x in leaves
  ]
  return hash(tuple(descriptions))
