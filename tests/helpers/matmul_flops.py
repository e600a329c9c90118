"""Counts what the equations of a jaxpr do, those of its loops as they run."""

from collections import Counter
from collections.abc import Iterator
import math
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _eqns

HALF = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
MATMULS = "dot_general", "conv_general_dilated"
# All that may compute in half precision, move it, or call what does.
ALLOWED_IN_HALF = {
  *MATMULS,
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


def iter_eqns(jaxpr: Any, num_executions: int = 1) -> Iterator[tuple[int, Any]]:
  """Each equation, and how often it runs. Branches count once each."""
  yield from iter_nested_eqns(
    getattr(jaxpr, "jaxpr", jaxpr).eqns, num_executions
  )


def iter_nested_eqns(
  eqns: list[Any], num_executions: int = 1
) -> Iterator[tuple[int, Any]]:
  """The same of some equations, and of all that they call."""
  for eqn in eqns:
    yield num_executions, eqn
    for inner in _eqns.subjaxprs(eqn):
      yield from iter_eqns(inner, num_executions * eqn.params.get("length", 1))


def count_flops_by_dtype(jaxpr: Any) -> Counter:
  """Return the FLOPs of matmuls and convolutions by the dtype of the result.

  A matmul whose operands differ in dtype, or which is narrowed only when it
  is done, counts under the widest.
  """
  flops: Counter = Counter()
  for num_executions, eqn in iter_eqns(jaxpr):
    if eqn.primitive.name in MATMULS:
      dtypes = [v.aval.dtype for v in (*eqn.invars[:2], *eqn.outvars)]
      widest = max(dtypes, key=lambda dtype: dtype.itemsize)
      flops[str(widest)] += num_executions * _count_matmul_flops(eqn)
  return flops


def half_flops_fraction(jaxpr: Any) -> float:
  """Return the fraction of FLOPs whose operands and result are float16."""
  flops = count_flops_by_dtype(jaxpr)
  return sum(flops[str(dtype)] for dtype in HALF) / sum(flops.values())


def count_matmuls(jaxpr: Any) -> int:
  """Count the matmuls that run."""
  return sum(
    times for times, eqn in iter_eqns(jaxpr) if eqn.primitive.name in MATMULS
  )


def list_half_arithmetic(jaxpr: Any) -> set[str]:
  """The primitives that take or make half, and neither multiply nor move."""
  return {
    eqn.primitive.name
    for _, eqn in iter_eqns(jaxpr)
    if eqn.primitive.name not in ALLOWED_IN_HALF
    and any(map(_is_half, eqn.invars + eqn.outvars))
  }


def list_half_sums(jaxpr: Any) -> set[str]:
  """Return primitives that sum in half precision, or whose transposes do."""
  names, constants = set(), set()
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
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


def _count_matmul_flops(eqn):
  out = eqn.outvars[0].aval
  dimension_numbers = eqn.params["dimension_numbers"]
  if eqn.primitive.name == "dot_general":
    (contracting_dims, _), _ = dimension_numbers
    num_terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracting_dims)
  else:
    kernel = eqn.invars[1].aval
    num_terms = kernel.size // kernel.shape[dimension_numbers.rhs_spec[0]]
  return 2 * out.size * num_terms
