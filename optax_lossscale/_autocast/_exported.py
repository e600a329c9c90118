"""Finds functions that were exported: they hold no jaxpr, and so no products.

What `jax.export` makes of a function is code for XLA, which runs as it is.
"""

from collections.abc import Iterator
import re

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _products

# A line with a product in float32, whose precision was not chosen.
_PRODUCT = re.compile(
  r"stablehlo\.(?:dot_general|convolution)\b(?!.*HIGHEST).*-> tensor<[^>]*f32>"
)


def places(jaxpr: core.Jaxpr) -> list[str]:
  """The calls of exported functions with products, each line once."""
  return list(dict.fromkeys(_places(jaxpr, "", set())))


def _places(
  jaxpr: core.Jaxpr, where: str, seen: set[core.Jaxpr]
) -> Iterator[str]:
  if jaxpr in seen:
    return
  seen.add(jaxpr)
  for eqn in jaxpr.eqns:
    if _products.is_kept(eqn):
      continue
    its_place = _jaxprs.Place().at(eqn, jaxpr).source or where
    if _PRODUCT.search(_jaxprs.exported_text(eqn)):
      yield _jaxprs.place_name(_jaxprs.name_of(eqn), its_place)
    for inner in _jaxprs.held_jaxprs(eqn):
      yield from _places(inner.jaxpr, its_place, seen)
