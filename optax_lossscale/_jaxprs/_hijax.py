"""Primitives of hijax, which hide their jaxprs in an object.

JAX is moving to these. Since 0.12 ``lax.custom_root``, ``jnp.ldexp`` and others
are such, and the flags ``jax_remat3``, ``jax_custom_vjp3``, ``jax_custom_jvp3``
and ``jax_scan3`` make such of ``checkpoint``, of custom rules and of ``scan``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
  "CustomJVPTraced": "custom_jvp_call",
  "CustomVJPTraced": "custom_vjp_call",
  "RematTraced": "remat2",
  "Scan3": "scan",
}
_ARE_CALLED = {"custom_jvp_call", "custom_vjp_call", "remat2"}


class HiScan(NamedTuple):
  """A ``scan`` of hijax, whose carry is kept in a Ref: it has no outputs.

  Attributes:
    body: the jaxpr of one iteration.
    slices: whether each input is sliced; the others are read as a whole.
    length: how many iterations there are.
    reverse: whether the last slice comes first.
    consts: how many inputs are known to be constants: none.
    carry: how many are a carry that is also returned: none.
  """

  body: ClosedJaxpr
  slices: tuple[bool, ...]
  length: int
  reverse: bool
  consts: int = 0
  carry: int = 0


def hi_scan_of(eqn: core.JaxprEqn) -> HiScan | None:
  """The parts of a ``scan`` of hijax; None if it is none, or not understood."""
  primitive = hi_primitive(eqn)
  bodies = [x for x in held_jaxprs(eqn) if fits(x, eqn)]
  length = getattr(primitive, "length", None)
  if type(primitive).__name__ != "Scan3" or length is None or len(bodies) != 1:
    return None
  body = bodies[0].jaxpr
  slices = tuple(map(_is_slice(length), eqn.invars, body.invars))
  is_whole = all(
    is_slice or shape_of(a) == shape_of(b)
    for is_slice, a, b in zip(slices, eqn.invars, body.invars, strict=True)
  )
  if not is_whole or not all(map(_is_slice(length), eqn.outvars, body.outvars)):
    return None
  reverse = getattr(primitive, "reverse", False)
  return HiScan(bodies[0], slices, length, bool(reverse))


def _is_slice(length: int) -> Callable[[Any, Any], bool]:
  return lambda outer, inner: shape_of(outer) == (length, *shape_of(inner))


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
