"""What `autocast` has to tell: what it found, and what it could not enter."""

from typing import Any

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _exported, _products

_MOST_LINES = 3
_REACHED = ""


class Told:
  """What there is to tell of a function that was rewritten.

  Attributes:
    products: how many products were found to run in half precision.
    missed: for each place that holds products and could not be entered, its
      share of the flops of all products.
    exported: the calls of functions with products that were exported.
  """

  def __init__(self) -> None:
    self.products = 0
    self.missed: dict[str, float] = {}
    self.exported: list[str] = []
    self._missed: dict[int, tuple[core.JaxprEqn, str]] = {}

  def miss(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> None:
    """Notes an equation of a jaxpr that could not be entered."""
    line = _jaxprs.Place().at(eqn, jaxpr).source
    where = _jaxprs.place_name(_jaxprs.name_of(eqn), line)
    self._missed[id(eqn)] = eqn, where  # With it, so that it keeps its id.

  def measure(self, closed: _jaxprs.ClosedJaxpr) -> None:
    """Finds out what was missed of the products of the whole jaxpr."""
    self.exported = _exported.places(closed)
    if not self._missed:
      return
    flops: dict[str, int] = {}
    for step in _jaxprs.walk(closed, _products.jaxprs_to_search):
      if _products.is_product(step.eqn):
        ways = (self._missed.get(id(x.eqn)) for x in step.way)
        where = next((where for _, where in filter(None, ways)), _REACHED)
        more = step.times * (_jaxprs.flops_of(step.eqn) or 1)  # as one product
        flops[where] = flops.get(where, 0) + more
    total = sum(flops.values()) or 1  # A loop may run for no step at all.
    self.missed = {
      where: n / total for where, n in flops.items() if where != _REACHED
    }

  def message(self, dtype: Any) -> str:
    """What to tell of products that were not reached; empty if all were."""
    parts = []
    if self.missed:
      parts.append(self._of_missed(dtype))
    if self.exported:
      parts.append(
        f"autocast cannot enter {_listed(self.exported)}: what was exported"
        " runs in float32, as it is written. If that is meant to be, mark it"
        " with optax_lossscale.keep_float32."
      )
    return " ".join(parts)

  def _of_missed(self, dtype: Any) -> str:
    largest = sorted(self.missed, key=lambda where: -self.missed[where])
    return (
      f"autocast cannot enter {_listed(largest)}:"
      f" {sum(self.missed.values()):.1%} of the flops of products are inside,"
      f" and run in float32, as they are written, instead of {dtype}. If that"
      " is meant to be, mark them with optax_lossscale.keep_float32."
    )


def _listed(places: list[str]) -> str:
  named = ", ".join(places[:_MOST_LINES])
  more = len(places) - _MOST_LINES
  return f"{named} and {more} more" if more > 0 else named
