"""Whether the user named a product that a rule computes."""

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import (
  _derivatives,
  _kept,
  _products,
)


def is_any_in_rule(
  kept: _kept.Kept,
  eqn: core.JaxprEqn,
  place: _jaxprs.Place,
  paths: _jaxprs.Paths,
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
  programs = [(x, paths) for x in _products.jaxprs_to_search(eqn)]
  if seen is not None:
    of_floats = paths.of(floats)
    inputs = (*of_floats, *paths.inputs)
    programs.append((seen, _jaxprs.Paths(inputs, of_floats)))
  # All are looked at, so that the nearest names are known.
  found = [kept.holds(place)]
  for closed, its_paths in programs:
    weights = _jaxprs.Known().of(closed, its_paths)
    inside = _products.jaxprs_to_search
    for step in _jaxprs.walk(closed, inside, weights=weights, start=place):
      if _products.is_product(step.eqn):
        found.append(kept.holds(step.place))
  return any(found)
