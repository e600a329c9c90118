"""Looks into rules: what their derivatives compute, and what they refuse."""

from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _rules


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


def hidden_derivative_of(eqn: core.JaxprEqn) -> _jaxprs.ClosedJaxpr | None:
  """The same, of a rule that may have products where its function has none.

  Functions with a ``custom_jvp`` that libraries bring are not asked: they are
  ``relu`` and its like, or linear algebra. Nor are rules that see what moves:
  they may refuse, and an older JAX then forgets what it has traced of them.
  """
  make = _rules.how_to_make(eqn)
  if make is _rules.custom_lin:
    residuals = eqn.invars[: eqn.params["num_res"]]
    avals = [[v.aval for v in some] for some in (residuals, eqn.outvars)]
    return jax.make_jaxpr(_rules.transpose_of(eqn))(*avals)
  if make is _rules.custom_jvp and _jaxprs.is_rule_of_library(eqn):
    return None
  its_own = getattr(_jaxprs.hi_primitive(eqn), "symbolic_zeros", False)
  sees_what_moves = eqn.params.get("symbolic_zeros", its_own)
  may_be_asked = (
    make in (_rules.custom_jvp, _rules.custom_vjp) and not sees_what_moves
  )
  return derivative_of(eqn)[1] if may_be_asked else None


def is_guard(eqn: core.JaxprEqn) -> bool:
  """Whether an equation returns what it is given, and has a rule of its own.

  Such a rule is there to refuse a derivative: Equinox guards by it what its
  rules are not to be asked for.
  """
  if _rules.how_to_make(eqn) is not _rules.custom_jvp:
    return False
  held = list(_jaxprs.held_jaxprs(eqn))
  return bool(held) and not any(inner.jaxpr.eqns for inner in held)
