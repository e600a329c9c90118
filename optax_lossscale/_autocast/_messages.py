"""What `autocast` has to tell of what it found, and of how it is called."""

import collections
from collections.abc import Callable, Container
import functools
import inspect
from typing import Any
import weakref

import jax
from jax.extend import core

from optax_lossscale._autocast import _products
from optax_lossscale._jaxprs import (
  _equations,
  _lines,
  _operations,
  _places,
  _types,
  _walk,
)

# Two calls are what one makes by hand, before and after a training, say.
_PATIENCE = 3

# How often with which shapes, by the code: a loop may make its loss anew in
# each step. The code is held weakly, and what a function holds not at all.
_counts: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = (
  weakref.WeakKeyDictionary()
)
_MOST_LINES = 3
_REACHED = ""


def of_missed(
  closed: _equations.ClosedJaxpr, missed: Container[core.JaxprEqn], dtype: Any
) -> str:
  """What to tell of products that were not reached; empty if all were.

  Args:
    closed: the jaxpr that was rewritten.
    missed: the equations that hold products and could not be entered.
    dtype: what their products would have run in.
  """
  shares, exported = _places_of(closed, missed)
  parts = []
  if shares:
    largest = sorted(shares, key=lambda where: -shares[where])
    parts.append(
      f"autocast left {_listed(largest)} unchanged: the matmuls and"
      f" convolutions inside ({sum(shares.values()):.1%} of the matmul FLOPs)"
      f" run in float32 instead of {dtype}. To keep them in float32 and silence"
      " this warning, wrap the function that calls them in"
      " optax_lossscale.keep_float32."
    )
  if exported:
    parts.append(
      f"autocast left {_listed(exported)} unchanged: the matmuls and"
      " convolutions of an exported function run in float32. To keep them in"
      " float32 and silence this warning, wrap the function that calls it in"
      " optax_lossscale.keep_float32."
    )
  return " ".join(parts)


def of_nothing(
  fun: Callable[..., Any], call: Callable[[], Any], dtype: Any
) -> str:
  """What to tell of a function in which nothing runs in half precision.

  Args:
    fun: the function.
    call: the same without arguments, to be called within a trace.
    dtype: what its products would have run in.
  """

  def inside(eqn: Any) -> list[_equations.ClosedJaxpr]:
    plain: list[Any] = [*_equations.subjaxprs(eqn)] or [
      _equations.lower_hijax(eqn)
    ]
    return [closed for closed in plain if closed]

  def traced() -> list[Any]:
    leaves = jax.tree.leaves(call())
    return [x for x in leaves if isinstance(x, jax.core.Tracer)]

  closed = jax.make_jaxpr(traced)()
  eqns: Any = [step.eqn for step in _walk.walk(closed, inside)]
  if any(map(_products.hides, eqns)):
    return ""
  products = filter(_operations.is_matmul, eqns)
  dtypes = {str(eqn.invars[0].aval.dtype) for eqn in products}
  name = getattr(fun, "__name__", type(fun).__name__)
  if not dtypes:
    return (
      f"autocast had no effect on {name}: it contains no matmul or convolution."
      f" Pass the function whose matmuls should run in {dtype}."
    )
  text = (
    f"autocast had no effect on {name}: it contains no float32 matmul or"
    f" convolution that autocast may cast to {dtype}, only some in"
    f" {' and '.join(sorted(dtypes))}."
  )
  if "float32" in dtypes:
    text += (
      " Matmuls of precision HIGHEST, also by jax.default_matmul_precision, and"
      " matmuls marked with keep_float32 stay in float32."
    )
  if dtypes & {"bfloat16", "float16"}:
    text += (
      " A model that already computes in half precision needs no autocast."
    )
  return text


def of_calls(fun: Callable[..., Any], given: Any, out: Any) -> str:
  """What to tell of a function that is called again and again, or nothing.

  Args:
    fun: the function.
    given: its arguments.
    out: what it returned: this tells whether anything compiles the call.

  Returns:
    The message at the third call with the same shapes outside of ``jit``, and
    nothing at all others.
  """
  arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
  # Who turned `jit` off wants it so.
  if jax.config.jax_disable_jit or not arrays:
    return ""
  if not all(map(_types.is_concrete, arrays)):
    return ""
  counts = _counts.setdefault(_code_of(fun), collections.Counter())
  shapes = _shapes_of((given, out))
  counts[shapes] += 1
  if counts[shapes] != _PATIENCE:
    return ""
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"autocast ran {name} outside of jit for the third time with the same"
    " shapes. Each call traces it again, runs its operations one by one and"
    f" recompiles the functions that are jitted inside. Call {name} in a jitted"
    " function, such as the training step."
  )


def _places_of(
  closed: _equations.ClosedJaxpr, missed: Container[core.JaxprEqn]
) -> tuple[dict[str, float], list[str]]:
  """Of the places that were missed, their shares of the flops of all products.

  And those that were exported, which do not tell their flops.
  """
  flops: dict[str, int] = {}
  exported: dict[str, None] = {}
  for step in _walk.walk(closed, _products.jaxprs_to_search):
    if _products.is_exported(step.eqn):
      exported[_where(step)] = None
    if _products.is_product(step.eqn):
      outer = next((x for x in step.ancestors if x.eqn in missed), None)
      where = _where(outer) if outer else _REACHED
      more = step.num_executions * (
        _operations.count_flops(step.eqn) or 1
      )  # as one product
      flops[where] = flops.get(where, 0) + more
  total = sum(flops.values()) or 1  # A loop may run for no step at all.
  flops.pop(_REACHED, None)
  return {where: n / total for where, n in flops.items()}, list(exported)


def _where(step: _walk.EqnVisit) -> str:
  return _places.format_location(
    _lines.get_op_name(step.eqn), step.location.source_line
  )


def _listed(places: list[str]) -> str:
  named = ", ".join(places[:_MOST_LINES])
  more = len(places) - _MOST_LINES
  return f"{named} and {more} more" if more > 0 else named


def _code_of(fun: Any) -> Any:
  """What is the same if a function, a method or a partial is made anew."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  fun = inspect.unwrap(fun)
  # Of a method or a layer: the code or the class.
  return getattr(fun, "__code__", type(fun))


def _shapes_of(tree: Any) -> int:
  """The shapes and dtypes as one number, so that nothing is held."""
  try:
    leaves = jax.tree.leaves(tree)
  except (TypeError, ValueError):  # Its keys have no order.
    return 0
  as_text = [
    f"{getattr(x, 'dtype', type(x))}{getattr(x, 'shape', '')}" for x in leaves
  ]
  return hash(tuple(as_text))
