"""Looks into rules: what their derivatives compute, and what they refuse."""

from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _products, _rules


def derivative_of(
  eqn: core.JaxprEqn,
) -> tuple[list[int], _jaxprs.ClosedJaxpr | None]:
  """The jaxpr of an equation and its derivatives, if it has them.

  It is what a rule computes, each equation with the line of the rule.

  Returns:
    Which inputs of the equation are floats; and the jaxpr, of these and then of
    all inputs.
  """
  floats = [
    i for i, atom in enumerate(eqn.invars) if _rules.is_float(atom.aval)
  ]
  avals = [atom.aval for atom in eqn.invars]

  def loss(some: list[Any], args: tuple[Any, ...]) -> Any:
    old = _jaxprs.function(_jaxprs.without_source(eqn))
    outs = _rules.of_some(old, args, floats)(*some)
    return sum(jnp.sum(jnp.real(x)) for x in outs if _rules.is_float(x))

  try:
    seen = jax.make_jaxpr(jax.grad(loss))([avals[i] for i in floats], avals)
  except Exception:  # A rule may refuse, or need the axes of a mesh.
    return floats, None
  return floats, seen


class InRule(NamedTuple):
  """The products that a function with a rule computes, and its derivative.

  Attributes:
    places: the place of the function, and of each product.
    is_all: whether its derivative could be looked at.
  """

  places: list[_jaxprs.Place]
  is_all: bool


def products_in_rule(
  eqn: core.JaxprEqn, place: _jaxprs.Place, paths: _jaxprs.Paths
) -> InRule:
  """Finds the products that a function with a rule computes.

  Args:
    eqn: the equation that calls the function.
    place: where it stands.
    paths: the names of those of its inputs that are weights.

  Returns:
    An :class:`InRule`.
  """
  floats, seen = derivative_of(eqn)
  inside = _products.jaxprs_to_search
  programs = [(x, paths) for x in inside(eqn)]
  if seen is not None:
    of_floats = paths.of(floats)
    inputs = (*of_floats, *paths.inputs)
    programs.append((seen, _jaxprs.Paths(inputs, of_floats)))
  places = [place]
  for closed, its_paths in programs:
    weights = _jaxprs.Known().of(closed, its_paths)
    steps = _jaxprs.walk(closed, inside, weights=weights, start=place)
    places += [x.place for x in steps if _products.is_product(x.eqn)]
  return InRule(places, seen is not None)


def hidden_derivative_of(eqn: core.JaxprEqn) -> _jaxprs.ClosedJaxpr | None:
  """The same, of a rule that may have products where its function has none.

  Functions with a ``custom_jvp`` that libraries bring are not asked: they are
  ``relu`` and its like, or linear algebra. Nor are rules that see which inputs
  are perturbed: they may refuse, and an older JAX then forgets what it has
  traced of them.
  """
  rule = _jaxprs.rule_of(eqn)
  if rule is None or rule.checkpoint is not None:
    return None
  if rule.kind == "custom_lin":
    residuals = eqn.invars[: rule.consts]
    avals = [[v.aval for v in some] for some in (residuals, eqn.outvars)]
    return jax.make_jaxpr(_rules.transpose_of(eqn, rule))(*avals)
  is_jvp = rule.kind == "custom_jvp_call"
  is_of_library = is_jvp and _jaxprs.is_rule_of_library(eqn)
  may_refuse = rule.sees_perturbed
  return None if is_of_library or may_refuse else derivative_of(eqn)[1]


def is_guard(eqn: core.JaxprEqn) -> bool:
  """Whether an equation returns what it is given, and has a rule of its own.

  Such a rule is there to refuse a derivative: Equinox guards by it what its
  rules are not to be asked for.
  """
  rule = _jaxprs.rule_of(eqn)
  if rule is None or rule.kind != "custom_jvp_call":
    return False
  held = list(_jaxprs.held_jaxprs(eqn))
  return bool(held) and not any(inner.jaxpr.eqns for inner in held)
