"""Primitives of hijax, which hide their jaxprs in an object.

JAX is moving to these. Since 0.12 ``lax.custom_root``, ``jnp.ldexp`` and others
are such, and the flags ``jax_remat3``, ``jax_custom_vjp3`` and
``jax_custom_jvp3`` make such of ``checkpoint`` and of custom rules.
"""

from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import (
  closed,
  ClosedJaxpr,
  fits,
  function,
  held_jaxprs,
  hi_primitive,
  shape_of,
)

# The class of the object, and which plain primitive it stands for.
BEHAVES_LIKE = {
  "CheckpointName": "name",
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "remat2",
  "Scan3": "scan",
}
_ARE_CALLED = {"custom_jvp_call", "custom_vjp_call", "remat2"}


def hi_call_of(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """What an equation of hijax calls, in its forward pass; None for all others.

  It is the jaxpr that the primitive has with it, if that is of the inputs and
  outputs of the equation: it knows its lines. Otherwise it is the lowered one.
  """
  name = BEHAVES_LIKE.get(type(hi_primitive(eqn)).__name__)
  for hidden in held_jaxprs(eqn):
    if name in _ARE_CALLED and _is_of_types(hidden, eqn):
      return hidden
  return lowered(eqn)


def _is_of_types(jaxpr: ClosedJaxpr, eqn: core.JaxprEqn) -> bool:
  if not fits(jaxpr, eqn):
    return False
  inner = [*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars]
  pairs = zip(inner, [*eqn.invars, *eqn.outvars], strict=True)
  return all(_kind(a) == _kind(b) for a, b in pairs)


def _kind(atom: Any) -> Any:
  return shape_of(atom), getattr(atom.aval, "dtype", None)


def lowered(eqn: core.JaxprEqn) -> ClosedJaxpr | None:
  """What an equation of hijax computes, in plain equations.

  This is its forward pass: a derivative of its own is lost.

  Returns:
    The jaxpr, of the inputs of the equation; None if the equation is of another
    kind, or cannot be taken apart.
  """
  if hi_primitive(eqn) is None:
    return None
  avals = [var.aval for var in eqn.invars]
  try:
    traced: Any = jax.jit(function(eqn)).trace(*avals)
    # There since JAX 0.10: all that is older has no such equations of its own.
    plain = getattr(traced, "lojax", None)
  except Exception:  # What a primitive of somebody else does is not known.
    return None
  inner = plain and closed(plain.jaxpr)
  # What is left of it would be lowered again and again.
  is_plain = inner is not None and not any(map(hi_primitive, inner.jaxpr.eqns))
  return inner if inner is not None and is_plain and fits(inner, eqn) else None
