"""Tag the operands of the forward pass whose inf an operation makes finite.

``1 / inf``, ``rsqrt(inf)`` and ``exp(-inf)`` are zero. If a number overflows
in half precision before such an operation, the loss stays finite, and its
gradients are wrong or zero. The tags make these operands outputs of the traced
function.
"""

import operator
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _tags
from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _primitives,
  _provenance,
)

# The index of the operand whose inf becomes finite. Squashing functions, such
# as tanh, are left out: a wider range does not change their result.
_ABSORBING_OPERANDS = {"div": 1, "exp": 0, "exp2": 0, "rsqrt": 0}
# A number in half precision is found through at most this many of these
# equations: a count of tokens is cast, and clamped to one, before it divides.
_MAX_CHAIN_LENGTH = 4
_CHAIN_PRIMITIVES = {
  "add", "convert_element_type", "max", "sqrt", *_primitives.BROADCASTING,
}  # fmt: skip
# Between a square and an exponential, these do not make the square smaller, if
# factors are at least the number below.
_FACTORS = {"div", "mul"}
_SIZE_PRESERVING = {
  "convert_element_type", "neg", "reduce_sum", *_FACTORS,
  *_primitives.BROADCASTING,
}  # fmt: skip
_MIN_FACTOR = 0.002


def tag_absorbed_operands(closed_jaxpr: _eqns.ClosedJaxpr) -> Any:
  """Return the jaxpr with tags of the kind ``"absorbed"``.

  The path of a tag is the name of the operation. Loops whose values cannot
  become outputs have no tags.
  """
  return _Tagger().tag_jaxpr(closed_jaxpr, _provenance.EqnLocation())


def is_suspicious_origin(site_primitive: str, origin_primitive: str) -> bool:
  """Return whether an inf was meant to be a number.

  An infinite divisor is. The exponential of -inf may be a mask, which is
  written in the program or added to scores, so only sums, powers and matmuls
  are suspicious there.

  Args:
    site_primitive: the operation that makes the inf finite.
    origin_primitive: the operation that returned the inf.
  """
  if not site_primitive.startswith("exp"):
    return True
  return origin_primitive in {
    "conv_general_dilated", "cumsum", "dot_general", "integer_pow",
    "ragged_dot_general", "reduce_sum", "square",
  }  # fmt: skip


class _Tagger:
  """Inserts tags, and caches the new jaxpr of each call."""

  def __init__(self) -> None:
    self._jaxprs: dict[Any, Any] = {}

  def tag_jaxpr(
    self, jaxpr: _eqns.AnyJaxpr, location: _provenance.EqnLocation
  ) -> Any:
    """Insert the tags of a jaxpr that is called from this location."""
    key = jaxpr, location.name_stack
    if key not in self._jaxprs:
      open_jaxpr: Any = _eqns.close_jaxpr(jaxpr).jaxpr
      defining_eqns = {v: eqn for eqn in open_jaxpr.eqns for v in eqn.outvars}
      new_eqns = [
        new_eqn
        for eqn in open_jaxpr.eqns
        for new_eqn in self._tag_eqn(eqn, defining_eqns, location)
      ]
      is_unchanged = all(map(operator.is_, new_eqns, open_jaxpr.eqns))
      self._jaxprs[key] = (
        jaxpr
        if is_unchanged
        else _eqns.replace_jaxpr_fields(jaxpr, eqns=new_eqns)
      )
    return self._jaxprs[key]

  def _tag_eqn(
    self,
    eqn: core.JaxprEqn,
    defining_eqns: dict[Any, core.JaxprEqn],
    location: _provenance.EqnLocation,
  ) -> list[core.JaxprEqn]:
    """Return the equation, and the equation of its tag before it, if any."""
    inner_location = location.push_scope(eqn)
    is_optimizer = _provenance.has_scope(eqn, _provenance.OPTIMIZER_SCOPE)
    if inner_location.is_backward or is_optimizer:
      return [eqn]
    if next(_eqns.subjaxprs(eqn), None) is not None:
      return [self._tag_subjaxprs(eqn, inner_location)]
    index = _get_absorbing_operand(eqn)
    if index is None or not _is_from_half(eqn.invars[index], defining_eqns):
      return [eqn]
    is_exp = eqn.primitive.name.startswith("exp")
    if is_exp and _is_square(eqn.invars[index], defining_eqns):
      return [eqn]

    def eval_with_tag(*operands: Any) -> list[Any]:
      tag = _tags.format_tag(_tags.Tag("absorbed", 0, eqn.primitive.name))
      tagged = list(operands)
      tagged[index] = checkpoint_name(tagged[index], tag)
      return _eqns.eqn_as_fun(eqn)(*tagged)

    replacement = _eqns.trace_replacement_eqns(eval_with_tag, eqn)
    return [eqn] if replacement is None else replacement[0]

  def _tag_subjaxprs(
    self, eqn: core.JaxprEqn, location: _provenance.EqnLocation
  ) -> core.JaxprEqn:
    is_hijax = _eqns.get_hi_primitive(eqn) is not None
    if is_hijax or _higher_order.parse_higher_order(eqn) is None:
      return eqn
    tag_body = lambda jaxpr: self.tag_jaxpr(jaxpr, location)
    tagged_eqn = _higher_order.call_in_eqn_context(
      eqn, lambda: _eqns.map_subjaxprs(eqn, tag_body)
    )
    bodies = [x.jaxpr for x in _eqns.subjaxprs(eqn)]
    new_bodies = [x.jaxpr for x in _eqns.subjaxprs(tagged_eqn)]
    is_unchanged = all(map(operator.is_, bodies, new_bodies))
    return eqn if is_unchanged else tagged_eqn


def _get_absorbing_operand(eqn: core.JaxprEqn) -> int | None:
  """Return the index of the operand whose inf becomes finite, or None."""
  exponent = _primitives.get_exponent(eqn)
  if exponent is not None:
    return 0 if exponent < 0 else None
  return _ABSORBING_OPERANDS.get(eqn.primitive.name)


def _is_square(atom: Any, defining_eqns: dict[Any, core.JaxprEqn]) -> bool:
  """Return whether an exponent is a square, or a sum or a multiple of squares.

  The exponential of a negative square that exceeds float16 is zero in float32,
  too.
  """
  eqn = _find_defining_eqn(atom, defining_eqns)
  while eqn is not None and eqn.primitive.name in _SIZE_PRESERVING:
    operands = list(eqn.invars)
    if eqn.primitive.name in _FACTORS:
      is_divisor = eqn.primitive.name == "div"
      operands = [x for x in operands if not _is_large_factor(x, is_divisor)]
    if len(operands) != 1:
      is_product = eqn.primitive.name == "mul" and len(operands) == 2
      return is_product and operands[0] is operands[1]
    eqn = _find_defining_eqn(operands[0], defining_eqns)
  return eqn is not None and eqn.primitive.name in {"integer_pow", "square"}


def _is_large_factor(atom: Any, is_divisor: bool) -> bool:
  """Return whether an operand is a number by which an inf stays a large number.

  In float32, the exponential of -65504 times such a number is zero.
  """
  if not isinstance(atom, core.Literal):
    return False
  factors = np.abs(np.asarray(atom.val, np.float32))
  is_large = (
    factors <= 1 / _MIN_FACTOR if is_divisor else factors >= _MIN_FACTOR
  )
  return bool(np.all(is_large))


def _find_defining_eqn(
  atom: Any, defining_eqns: dict[Any, core.JaxprEqn]
) -> core.JaxprEqn | None:
  is_literal = isinstance(atom, core.Literal)
  return None if is_literal else defining_eqns.get(atom)


def _is_from_half(
  atom: Any, defining_eqns: dict[Any, core.JaxprEqn], depth: int = 0
) -> bool:
  """Return whether an operand may hold an inf of float16 or float8."""
  dtype: Any = getattr(atom.aval, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    return False
  if _arrays.has_narrow_range(dtype):
    if not isinstance(atom, core.Literal):
      return True
    return bool(np.isinf(np.asarray(atom.val, np.float32)).any())
  eqn = _find_defining_eqn(atom, defining_eqns)
  if eqn is None or eqn.primitive.name not in _CHAIN_PRIMITIVES:
    return False
  # The matmuls of `autocast` are compared with float32.
  autocast_dtypes = _provenance.EqnLocation().push_scope(eqn).matmul_dtypes
  return (
    depth < _MAX_CHAIN_LENGTH
    and autocast_dtypes is None
    and any(_is_from_half(x, defining_eqns, depth + 1) for x in eqn.invars)
  )
