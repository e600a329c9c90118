"""Which equations run in half precision: products, and what moves results."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs

# Functions marked with this scope keep their products in float32. The scope
# stays in the name stack of an equation, whatever transforms the function.
KEEP_FLOAT32 = "keep_float32"

# These move one array, or leave it where it is, and so do their transposes, and
# what `vmap` makes of both. So none of them ever becomes a sum of cotangents,
# which half precision must not compute. What takes an index, or several arrays,
# is not such: under `vmap` a `dynamic_slice` becomes a gather, and a
# `concatenate` of shared and mapped arrays a broadcast, whose transposes are
# sums. The transpose of `split` is a `concatenate`.
MOVES = {
  "copy", "name", "optimization_barrier", "reshape", "rev",
  "sharding_constraint", "slice", "squeeze", "transpose",
}  # fmt: skip
# So do these between the devices of a mesh. Along an axis of `vmap` they would
# become operations with an index.
_MOVES_BETWEEN_DEVICES = {"all_to_all", "ppermute"}


def is_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a float32 product that may run in half precision.

  It multiplies matrices, or convolves. A product that contracts one element
  is none: the angles of rotary embeddings are such, and half precision has too
  few bits for them. Nor is one of two vectors, which is a sum. And it is left
  alone if its precision was chosen, or if it is marked.
  """
  contracts = _CONTRACTS.get(eqn.primitive.name)
  if contracts is None or "preferred_element_type" not in eqn.params:
    return False
  floats: list[Any] = [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]
  return (
    all(aval.dtype == jnp.float32 for aval in floats)
    and not _is_chosen(eqn.params.get("precision"))
    and contracts(eqn)
    and not is_kept(eqn)
  )


def is_kept(eqn: core.JaxprEqn) -> bool:
  """Whether the equation stands in a function marked to stay in float32."""
  return _jaxprs.has_scope(eqn, KEEP_FLOAT32)


def moves(eqn: core.JaxprEqn) -> bool:
  """Whether the equation moves data, and computes nothing.

  To be called where an equation stands, within its ``shard_map``.
  """
  if eqn.primitive.name in MOVES:
    return True
  if eqn.primitive.name not in _MOVES_BETWEEN_DEVICES:
    return False
  axes = eqn.params.get("axis_name")
  axes = axes if isinstance(axes, (tuple, list)) else (axes,)
  return set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def jaxprs_to_search(eqn: core.JaxprEqn) -> list[_jaxprs.ClosedJaxpr]:
  """The jaxprs that an equation holds or hides, unless it is marked."""
  held = list(_jaxprs.held_jaxprs(eqn))
  plain = None if held else _jaxprs.lowered(eqn)
  held += [] if plain is None else [plain]
  return [] if held and is_kept(eqn) else held


class Search(_jaxprs.Search):
  """Looks for products, once in each jaxpr.

  Attributes:
    derivative_of: what a rule computes, of equations whose products may all be
      in their derivative; None if nobody asks for that.
  """

  def __init__(
    self,
    derivative_of: Callable[[core.JaxprEqn], _jaxprs.ClosedJaxpr | None]
    | None = None,
  ) -> None:
    super().__init__(is_product, jaxprs_to_search)
    self.derivative_of = derivative_of
    self._in_rules: dict[int, tuple[core.JaxprEqn, bool]] = {}

  def inside_of(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products in what an equation holds.

    Or in its derivative, if there are no others.
    """
    inside = super().inside_of
    # A rule may need the axes of the mesh.
    if _jaxprs.where_it_runs(eqn, lambda: inside(eqn)):
      return True
    if self.derivative_of is None or is_kept(eqn):
      return False  # Nothing is inside of what is marked.
    if id(eqn) not in self._in_rules:
      seen = self.derivative_of(eqn)
      # The rules that a derivative calls are not differentiated once more.
      found = seen is not None and Search().in_jaxpr(seen.jaxpr)
      self._in_rules[id(eqn)] = eqn, found  # With it, so that it keeps its id.
    return self._in_rules[id(eqn)][1]


def _is_chosen(precision: Any) -> bool:
  """Whether the precision was asked for: the highest one, or an algorithm."""
  sides = precision if isinstance(precision, tuple) else (precision,)
  usual = (None, lax.Precision.DEFAULT, lax.Precision.HIGH)
  return any(side not in usual for side in sides)


def _multiplies_matrices(eqn: core.JaxprEqn) -> bool:
  left, out = _array(eqn.invars[0]), _array(eqn.outvars[0])
  (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
  # Sizes may be symbolic, so that it is not known which one is larger.
  terms = math.prod(left.shape[i] for i in contracted)
  products = math.prod(left.shape[i] for i in batched)
  return terms != 1 and out.size != products


def _convolves(eqn: core.JaxprEqn) -> bool:
  kernel, out = _array(eqn.invars[1]), _array(eqn.outvars[0])
  features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
  return kernel.size != features and out.size != 1


def _array(var: Any) -> Any:
  """The shape and the dtype of an array."""
  return var.aval


_CONTRACTS = {
  "conv_general_dilated": _convolves,
  "dot_general": _multiplies_matrices,
  "ragged_dot_general": lambda eqn: True,  # of a matrix for each expert
}
