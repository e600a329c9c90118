"""What `autocast` has to tell: of products not reached, and of calls."""

import collections
from collections.abc import Callable, Iterable, Mapping
import functools
import inspect
import re
from typing import Any
import weakref

import jax
from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _products

# A line with a product in float32, whose precision was not chosen.
_PRODUCT = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
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
  closed: _jaxprs.ClosedJaxpr,
  missed: Mapping[core.JaxprEqn, core.Jaxpr],
  dtype: Any,
) -> str:
  """What to tell of products that were not reached; empty if all were.

  Args:
    closed: the jaxpr that was rewritten.
    missed: the equations that hold products and could not be entered, each with
      the jaxpr that it stands in.
    dtype: what their products would have run in.
  """
  parts = []
  exported = _exported(closed)
  shares = _shares(closed, missed) if missed else {}
  if shares:
    largest = sorted(shares, key=lambda where: -shares[where])
    parts.append(
      f"autocast cannot enter {_listed(largest)}:"
      f" {sum(shares.values()):.1%} of the flops of products are inside, and"
      f" run in float32, as they are written, instead of {dtype}. If that is"
      " meant to be, mark them with optax_lossscale.keep_float32."
    )
  if exported:
    parts.append(
      f"autocast cannot enter {_listed(exported)}: what was exported runs in"
      " float32, as it is written. If that is meant to be, mark it with"
      " optax_lossscale.keep_float32."
    )
  return " ".join(parts)


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
  if not all(map(_jaxprs.is_known, arrays)):
    return ""
  counts = _counts.setdefault(_code_of(fun), collections.Counter())
  shapes = _shapes_of((given, out))
  counts[shapes] += 1
  if counts[shapes] != _PATIENCE:
    return ""
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"autocast ran {name} outside of jit, for the third time with the same"
    " shapes. Each call traces it again, runs its operations one by one, and"
    " compiles anew what is jitted inside: call it in a jitted function, such"
    " as the training step."
  )


def _shares(
  closed: _jaxprs.ClosedJaxpr, missed: Mapping[core.JaxprEqn, core.Jaxpr]
) -> dict[str, float]:
  """For each place that was missed, its share of the flops of all products."""
  flops: dict[str, int] = {}
  for step in _jaxprs.walk(closed, _products.jaxprs_to_search):
    if _products.is_product(step.eqn):
      eqns: Iterable[Any] = (around.eqn for around in step.way)
      outer = next((eqn for eqn in eqns if eqn in missed), None)
      where = _where(outer, missed[outer]) if outer else _REACHED
      more = step.times * (_jaxprs.flops_of(step.eqn) or 1)  # as one product
      flops[where] = flops.get(where, 0) + more
  total = sum(flops.values()) or 1  # A loop may run for no step at all.
  return {where: n / total for where, n in flops.items() if where != _REACHED}


def _where(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> str:
  source = _jaxprs.Place().at(eqn, jaxpr).source
  return _jaxprs.place_name(_jaxprs.name_of(eqn), source)


def _listed(places: list[str]) -> str:
  named = ", ".join(places[:_MOST_LINES])
  more = len(places) - _MOST_LINES
  return f"{named} and {more} more" if more > 0 else named


def _exported(closed: _jaxprs.ClosedJaxpr) -> list[str]:
  """The calls of exported functions with products, each line once."""
  seen: set[core.Jaxpr] = set()

  def inside(eqn: core.JaxprEqn) -> list[_jaxprs.ClosedJaxpr]:
    held = [] if _products.is_kept(eqn) else list(_jaxprs.held_jaxprs(eqn))
    new = [inner for inner in held if inner.jaxpr not in seen]
    seen.update(inner.jaxpr for inner in new)
    return new

  found = [
    _jaxprs.place_name(_jaxprs.name_of(step.eqn), step.place.source)
    for step in _jaxprs.walk(closed, inside)
    if _PRODUCT.search(_jaxprs.exported_text(step.eqn))
    and not _products.is_kept(step.eqn)
  ]
  return list(dict.fromkeys(found))


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
