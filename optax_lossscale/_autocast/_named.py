"""Whether the user named a product that a rule computes."""

from collections.abc import Sequence

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import (
  _derivatives,
  _kept,
  _products,
  _weights,
)


def is_any_in_rule(
  kept: _kept.Kept,
  eqn: core.JaxprEqn,
  place: _jaxprs.Place,
  paths: Sequence[_weights.Path],
) -> bool:
  """Whether a product in a function with a rule is named, or in its derivative.

  Args:
    kept: what the user named.
    eqn: the equation that calls the function.
    place: where it stands.
    paths: the names of those of its inputs that are weights.

  Returns:
    Whether at least one is.
  """
  floats, seen = _derivatives.derivative_of(eqn)
  kept.has_unseen |= seen is None
  jaxprs = [(x, paths) for x in _products.jaxprs_to_search(eqn)]
  if seen is not None:
    jaxprs.append((seen, [*(paths[i] for i in floats), *paths]))
  # All are looked at, so that the nearest names are known.
  return any(
    [kept.holds(place), *(_is_any(kept, x, place, y) for x, y in jaxprs)]
  )


def _is_any(
  kept: _kept.Kept,
  jaxpr: core.Jaxpr,
  place: _jaxprs.Place,
  paths: Sequence[_weights.Path] = (),
) -> bool:
  found = []
  weights = _weights.Weights(jaxpr.invars, paths)
  for eqn in jaxpr.eqns:
    weights.follow(eqn)
    if _products.is_product(eqn):
      named = _jaxprs.with_scope(eqn, weights.name_of_product(eqn))
      found.append(kept.holds(place.at(named, jaxpr)))
    inner = _products.jaxprs_to_search(eqn)
    if not inner:
      continue
    # What is named is the body that runs, and as the body names it.
    scopes = _products.Search().scopes_in(eqn) or set()
    name, its_paths = weights.within_call(eqn, scopes)
    its_place = place.at(_jaxprs.with_scope(eqn, name), jaxpr)
    of_bodies = _weights.of_bodies(eqn, its_paths)
    found += [_is_any(kept, x, its_place, of_bodies.get(x, ())) for x in inner]
  return any(found)
