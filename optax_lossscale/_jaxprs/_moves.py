"""Which equations only move numbers, and compute none.

Three questions are asked, and each set answers one. What may stay in half
precision is the narrowest; what keeps a weight a weight takes most.
"""

from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

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
BETWEEN_DEVICES = {"all_to_all", "ppermute"}
# What these make of one number are copies of it.
SPREAD = {"broadcast_in_dim", "copy", "pvary", "reshape", "squeeze"}
# What these make of a weight is still that weight, and each of several outputs
# is a part of it.
KEEP = MOVES | SPREAD | {
  "all_gather", "convert_element_type", "device_put", "dynamic_slice",
  "reduce_precision", "reshard", "select_n", "split", "stop_gradient",
  "unstack",
}  # fmt: skip


def moves(eqn: core.JaxprEqn) -> bool:
  """Whether an equation and all that JAX makes of it only move one array.

  To be called where the equation stands, within its ``shard_map``.
  """
  if eqn.primitive.name not in BETWEEN_DEVICES:
    return eqn.primitive.name in MOVES
  axes: Any = eqn.params.get("axis_name")
  axes = axes if isinstance(axes, (tuple, list)) else (axes,)
  return set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def rounds_to_own_precision(eqn: core.JaxprEqn) -> bool:
  """Whether an equation rounds an array to the precision that it has."""
  kind: Any = eqn.invars[0].aval if eqn.invars else None
  if eqn.primitive.name != "reduce_precision":
    return False
  info: Any = jnp.finfo(kind.dtype)
  bits = eqn.params.get("exponent_bits"), eqn.params.get("mantissa_bits")
  return bits == (info.nexp, info.nmant)
