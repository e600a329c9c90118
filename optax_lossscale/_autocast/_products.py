"""Which equations run in half precision: products, and what moves results."""

import math
from typing import Any

from jax import lax
from jax.extend import core
import jax.numpy as jnp

# Functions marked with this scope keep their products in float32. The scope
# stays in the name stack of an equation, whatever transforms the function.
KEEP_FLOAT32 = "keep_float32"

# These move data, or leave it where it is, and so do their transposes. A
# transpose that is a sum must not run in half: those of broadcast_in_dim,
# gather, pad and all_gather are.
_MOVES = {
  "all_to_all",
  "concatenate",
  "copy",
  "dynamic_slice",
  "dynamic_update_slice",
  "name",
  "optimization_barrier",
  "ppermute",
  "reshape",
  "rev",
  "select_n",
  "sharding_constraint",
  "slice",
  "split",
  "squeeze",
  "transpose",
}


def is_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a float32 product that may run in half precision.

  It multiplies matrices, or convolves. A product that contracts one element
  is none: the angles of rotary embeddings are such, and half precision has too
  few bits for them. Nor is one of two vectors, which is a sum. And it is left
  alone if its precision was chosen, or if it is marked.
  """
  if eqn.primitive.name not in _CONTRACTS or is_kept(eqn):
    return False
  floats: list[Any] = [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]
  return (
    all(aval.dtype == jnp.float32 for aval in floats)
    and not _is_chosen(eqn.params["precision"])
    and _CONTRACTS[eqn.primitive.name](eqn)
  )


def is_kept(eqn: core.JaxprEqn) -> bool:
  """Whether the equation stands in a function marked to stay in float32."""
  return KEEP_FLOAT32 in str(eqn.source_info.name_stack)


def moves(eqn: core.JaxprEqn) -> bool:
  """Whether the equation moves data, and computes nothing."""
  return eqn.primitive.name in _MOVES


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
