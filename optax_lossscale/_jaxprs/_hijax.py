"""Primitives of hijax, which hide their jaxprs in an object.

JAX is moving to these. Since 0.12 ``lax.custom_root``, ``jnp.ldexp`` and others
are such, and the flags ``jax_remat3``, ``jax_custom_vjp3``, ``jax_custom_jvp3``
and ``jax_scan3`` make such of ``checkpoint``, of custom rules and of ``scan``.
"""

from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import closed, ClosedJaxpr, function

# The class of the object, and which plain primitive it stands for.
BEHAVES_LIKE = {
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "remat2",
  "Scan3": "scan",
}


def hi_primitive(eqn: core.JaxprEqn) -> Any:
  """The object that an equation of hijax calls; None for all others."""
  if eqn.primitive.name != "call_hi_primitive":
    return None
  return eqn.params.get("_prim")


def hidden_jaxprs(eqn: core.JaxprEqn) -> list[ClosedJaxpr]:
  """The jaxprs in the object of an equation of hijax; none of all others."""
  primitive = hi_primitive(eqn)
  if primitive is None:
    return []
  params = getattr(primitive, "params", {}).values()
  # What was traced by `jax.jit` has its jaxpr as an attribute.
  found = [
    closed(jaxpr)
    for jaxpr in (getattr(param, "jaxpr", param) for param in params)
    if isinstance(jaxpr, (core.Jaxpr, ClosedJaxpr))
  ]
  plain = None if found else lowered(eqn)
  return found if plain is None else [plain]


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
  except Exception:  # It needs what is around it, such as devices.
    return None
  # There since JAX 0.10: all that is older has no such equations of its own.
  plain = getattr(traced, "lojax", None)
  inner = plain and closed(plain.jaxpr)
  if inner is None or len(inner.jaxpr.invars) != len(eqn.invars):
    return None
  return inner
