"""What `autocast` has to tell of products that it could not reach."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _exported, _products

_MOST_LINES = 3
_REACHED = ""


def message(
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
  exported = _exported.places(closed)
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
