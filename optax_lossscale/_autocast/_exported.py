"""Finds functions that were exported: they hold no jaxpr, and so no products.

What `jax.export` makes of a function is code for XLA, which runs as it is.
"""

import re

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _products

# A line with a product in float32, whose precision was not chosen.
_PRODUCT = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
)


def places(closed: _jaxprs.ClosedJaxpr) -> list[str]:
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
