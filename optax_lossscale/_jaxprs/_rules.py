"""What an equation tells of a function with a derivative of its own.

It holds a rule, which is a Python function that JAX calls when it
differentiates. A ``checkpoint`` of hijax is such an equation, too: only the
function that made it can make it anew.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import (
  called_jaxpr,
  ClosedJaxpr,
  held_jaxprs,
  hi_primitive,
)
from optax_lossscale._jaxprs._hijax import BEHAVES_LIKE, lowered

# The second is the tangent of a function with the third.
RULES = {"custom_jvp_call", "custom_lin", "custom_vjp_call"}
_OF_HIJAX = {*RULES, "remat2"}


class Rule(NamedTuple):
  """A function with a rule.

  Attributes:
    kind: one of ``RULES``, or ``remat2``.
    consts: how many first inputs have no derivative: what the user's function
      closes over, or the residuals of a tangent; None if it is not known.
    sees_perturbed: whether the rule is told which inputs are perturbed.
    batches_itself: whether ``vmap`` maps the rule as any other function.
    checkpoint: makes the ``checkpoint`` of a function; None of other kinds.
  """

  kind: str
  consts: int | None
  sees_perturbed: bool
  batches_itself: bool = False
  checkpoint: Callable[[Any], Any] | None = None


def rule_of(eqn: core.JaxprEqn) -> Rule | None:
  """The rule of an equation; None if it has none, or is not understood."""
  primitive = hi_primitive(eqn)
  if primitive is not None:
    return _rule_of_hijax(primitive)
  if eqn.primitive.name not in RULES:
    return None
  params: Any = eqn.params
  consts = params.get("num_consts", params.get("num_res"))
  sees_perturbed = bool(params.get("symbolic_zeros"))
  return Rule(eqn.primitive.name, consts, sees_perturbed)


def _rule_of_hijax(primitive: Any) -> Rule | None:
  kind = BEHAVES_LIKE.get(type(primitive).__name__)
  is_whole = kind != "remat2" or hasattr(primitive, "policy")
  if kind not in _OF_HIJAX or not is_whole:
    return None
  checkpoint = functools.partial(
    jax.checkpoint,
    policy=getattr(primitive, "policy", None),
    # Not there before JAX 0.11: remove the default once jax >= 0.11.
    prevent_cse=getattr(primitive, "prevent_cse", True),
  )
  return Rule(
    kind,
    # In hijax these are two arguments before all others.
    len(jax.tree.leaves(getattr(primitive, "in_avals", ())[:2])),
    getattr(primitive, "symbolic_zeros", False),
    getattr(primitive, "generic_batching", False),
    checkpoint if kind == "remat2" else None,
  )


def body_of_rule(eqn: core.JaxprEqn, rule: Rule) -> ClosedJaxpr | None:
  """What a function with a rule computes where nothing is differentiated."""
  if rule.checkpoint is not None:
    return next(held_jaxprs(eqn), None)
  return called_jaxpr(eqn) or lowered(eqn)
