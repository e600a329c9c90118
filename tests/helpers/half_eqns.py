"""The operations of a jaxpr that run in half precision."""

from typing import Any

from jax.extend import core
import jax.numpy as jnp

from helpers.jaxprs import iter_eqns
from optax_lossscale._jaxprs import _eqns

HALF = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
# All that may compute in half precision, move it, or call what does.
ALLOWED_IN_HALF = {
  "dot_general",
  "conv_general_dilated",
  "convert_element_type",
  # Primitives that move data. The last two are in its derivatives, which put
  # slices back among zeros.
  "copy",
  "name",
  "optimization_barrier",
  "reshape",
  "rev",
  "slice",
  "squeeze",
  "transpose",
  "broadcast_in_dim",
  "pad",
  # Primitives that call functions.
  "call_hi_primitive",
  "jit",
  "remat2",
  "scan",
}


def list_half_arithmetic(jaxpr: Any) -> set[str]:
  """The primitives that take or make half, and neither multiply nor move."""
  return {
    eqn.primitive.name
    for eqn in iter_eqns(jaxpr.eqns)
    if eqn.primitive.name not in ALLOWED_IN_HALF
    and any(map(_is_half, eqn.invars + eqn.outvars))
  }


def list_half_sums(jaxpr: Any) -> set[str]:
  """Return primitives that sum in half precision, or whose transposes do."""
  names, constants = set(), set()
  for eqn in jaxpr.eqns:
    for inner in _eqns.subjaxprs(eqn):
      names |= list_half_sums(inner)
    # Zeros that JAX spreads, where a cotangent is missing, have no derivative.
    if all(isinstance(v, core.Literal) or v in constants for v in eqn.invars):
      constants.update(eqn.outvars)
    elif _is_sum_or_broadcast(eqn) and any(map(_is_half, eqn.outvars)):
      names.add(eqn.primitive.name)
  return names


def _is_half(var):
  return getattr(var.aval, "dtype", None) in HALF


def _is_sum_or_broadcast(eqn):
  sizes = [getattr(v.aval, "size", 0) for v in (*eqn.invars, *eqn.outvars)]
  if eqn.primitive.name in ("broadcast_in_dim", "reduce_sum"):
    return sizes[0] != sizes[-1]  # A broadcast of nothing adds up nothing.
  return eqn.primitive.name in _SUMMING


# The last three put data where an index says, or next to other data: what is
# left of them under a `vmap` is a gather or a broadcast.
_SUMMING = {
  "add",
  "add_any",
  "all_gather",
  "cumsum",
  "gather",
  "psum",
  "psum_invariant",
  "pvary",
  "reduce_scatter",
  "reduce_window_sum",
  "scatter-add",
  "scatter_add",
  "concatenate",
  "dynamic_slice",
  "dynamic_update_slice",
  "select_n",
}
