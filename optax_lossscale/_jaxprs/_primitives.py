"""JAX's primitives and types: matmuls, casts, data movement, mesh axes."""

from collections.abc import Callable, Hashable
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

# Three sets of data-movement primitives. DATA_MOVEMENT is the narrowest, since
# `autocast` keeps its results in half precision; WEIGHT_PRESERVING the widest.
#
# These primitives have one array operand, and the set is closed under transpose
# and `vmap`. So none of them becomes a sum of cotangents, which must not run in
# half precision. Primitives with an index or several arrays are excluded: under
# `vmap` a `dynamic_slice` becomes a gather, and a `concatenate` of mapped and
# unmapped arrays contains a broadcast; the transposes of both are sums. The
# transpose of `split` is a `concatenate`.
DATA_MOVEMENT = {
  "copy", "name", "optimization_barrier", "reshape", "rev",
  "sharding_constraint", "slice", "squeeze", "transpose",
}  # fmt: skip
# These move data between the devices of a mesh, with the same properties. (For
# a `vmap` axis they become primitives with an index.)
PERMUTING_COLLECTIVES = {"all_to_all", "ppermute"}
# If the operand contains one number only, the result does, too.
BROADCASTING = {"broadcast_in_dim", "copy", "pvary", "reshape", "squeeze"}
# If the operand is a weight, the result is the same weight for the purpose of
# naming layers. Each of several outputs is a part of the weight.
WEIGHT_PRESERVING = DATA_MOVEMENT | BROADCASTING | {
  "all_gather", "convert_element_type", "device_put", "dynamic_slice",
  "reduce_precision", "reshard", "select_n", "split", "stop_gradient",
  "unstack",
}  # fmt: skip
# These combine updates with an array at given indices. One of them computes the
# gradient of a gather, such as an embedding.
SCATTER_REDUCTIONS = {"scatter-add", "scatter-mul", "scatter-sub"}


def is_matmul(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation is a matmul or a convolution."""
  return eqn.primitive.name in _FLOP_COUNTERS


def has_castable_dtypes(eqn: core.JaxprEqn) -> bool:
  """Return whether ``autocast`` may cast the operands of an equation.

  It may do so for matmuls and convolutions, with three exceptions: an outer
  product (a contraction of size one), since half precision has too few bits for
  the angles of rotary embeddings; an inner product of vectors, which is a sum;
  and a matmul whose ``precision=`` is the highest one or an algorithm.
  """
  multiplies_matrices = CONTRACTION_PREDICATES.get(eqn.primitive.name)
  precision: Any = eqn.params.get("precision")
  precisions = precision if isinstance(precision, tuple) else (precision,)
  castable_precisions = (None, lax.Precision.DEFAULT, lax.Precision.HIGH)
  return (
    multiplies_matrices is not None
    and "preferred_element_type" in eqn.params
    and all(x in castable_precisions for x in precisions)
    and multiplies_matrices(eqn)
  )


def replace_result_dtype(
  eqn: core.JaxprEqn, dtype: Any, **params: Any
) -> core.JaxprEqn:
  """Set the result dtype of a matmul or convolution, and further parameters."""
  params = {**eqn.params, "preferred_element_type": jnp.dtype(dtype), **params}
  return eqn.replace(params=params)


def map_dtypes(
  eqn: core.JaxprEqn, map_fn: Callable[[Any], Any]
) -> core.JaxprEqn:
  """Replace each dtype among the parameters of an equation.

  Args:
    eqn: the equation.
    map_fn: a function from a dtype to a dtype.
  """
  params = {
    k: jnp.dtype(map_fn(v)) if isinstance(v, jnp.dtype) else v
    for k, v in eqn.params.items()
  }
  return eqn.replace(params=params)


def make_convert_eqn(
  invar: Any, outvar: Any, template: core.JaxprEqn
) -> core.JaxprEqn:
  """Make a ``convert_element_type`` with the source info of an equation.

  Args:
    invar: the variable to convert.
    outvar: the variable that the equation defines.
    template: the equation whose source info and context it has.
  """
  convert_eqn = _trace_convert_eqn(outvar.aval.dtype)
  return template.replace(
    invars=[invar],
    outvars=[outvar],
    primitive=convert_eqn.primitive,
    # The matmul of two weakly typed arrays has a weakly typed result, and the
    # variable must keep its type.
    params={**convert_eqn.params, "weak_type": outvar.aval.weak_type},
    effects=convert_eqn.effects,
  )


@functools.cache
def _trace_convert_eqn(dtype: Any) -> core.JaxprEqn:
  """Trace a ``convert_element_type`` equation, to copy its parameters."""
  trace_convert = jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))
  (eqn,) = trace_convert(jax.ShapeDtypeStruct((), jnp.int8)).eqns
  return eqn


def count_eqn_flops(eqn: core.JaxprEqn) -> int | None:
  """Count the FLOPs of a matmul or convolution.

  A multiplication and an addition are two FLOPs. As in XLA's cost analysis, the
  terms of a convolution that multiply its padding don't count.

  Returns:
    The FLOPs; None for other equations, for unknown parameters, and for
    symbolic shapes.
  """
  flop_counter = _FLOP_COUNTERS.get(eqn.primitive.name)
  try:
    flops = flop_counter and flop_counter(eqn)
  except (AttributeError, KeyError, TypeError, ValueError):
    return None  # This JAX has other parameters.
  # If sizes are symbolic, the result is not an int.
  return flops if isinstance(flops, int) else None


def _is_matrix_contraction(eqn: Any) -> bool:
  """Return whether a ``dot_general`` is neither an outer nor an inner product.

  For batched operands the question is about the matmul of one batch entry.
  """
  lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
  (contracting_dims, _), (batch_dims, _) = eqn.params["dimension_numbers"]
  # Sizes may be symbolic: these support `!=`, but not always an order.
  contraction_size = math.prod(lhs.shape[i] for i in contracting_dims)
  batch_size = math.prod(lhs.shape[i] for i in batch_dims)
  return contraction_size != 1 and out.size != batch_size


def _is_nontrivial_conv(eqn: Any) -> bool:
  """Return whether a convolution is neither an outer nor an inner product."""
  kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
  out_features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
  return kernel.size != out_features and out.size != 1


# For each primitive whose operands may be cast: does this equation multiply
# matrices? A `ragged_dot_general` multiplies by the matrix of each expert.
CONTRACTION_PREDICATES = {
  "conv_general_dilated": _is_nontrivial_conv,
  "dot_general": _is_matrix_contraction,
  "ragged_dot_general": lambda eqn: True,
}


def _count_dot_flops(eqn: Any) -> int:
  """Count the FLOPs of a ``dot_general``."""
  (contracting_dims, _), _ = eqn.params["dimension_numbers"]
  return _count_contraction_flops(eqn, contracting_dims)


def _count_contraction_flops(eqn: Any, contracting_dims: Any) -> int:
  """Count the FLOPs if each entry of the result contracts these axes."""
  lhs = eqn.invars[0].aval.shape
  contraction_size = math.prod(lhs[axis] for axis in contracting_dims)
  return 2 * contraction_size * math.prod(eqn.outvars[0].aval.shape)


def _count_ragged_dot_flops(eqn: Any) -> int:
  """Count the FLOPs of a ``ragged_dot_general``.

  Each row of the ragged operand belongs to one group, so the number of groups
  is not a factor.
  """
  dimension_numbers = eqn.params["ragged_dot_dimension_numbers"]
  (contracting_dims, _), _ = dimension_numbers.dot_dimension_numbers
  flops = _count_contraction_flops(eqn, contracting_dims)
  (ragged_dim,) = dimension_numbers.lhs_ragged_dimensions
  if ragged_dim not in contracting_dims:
    return flops
  # Each group contracts its own terms only, and has a result for itself.
  num_groups = eqn.invars[2].aval.shape[-1]
  return flops // num_groups


def _count_conv_flops(eqn: Any) -> int:
  """Count the FLOPs of a convolution, except multiplications of padding."""
  params = eqn.params
  lhs, rhs = (v.aval.shape for v in eqn.invars)
  (out,) = (v.aval.shape for v in eqn.outvars)
  dimension_numbers = params["dimension_numbers"]
  # The first two entries of each spec are not spatial: batch and feature of the
  # input and the output, output and input feature of the kernel.
  _, _, *lhs_axes = dimension_numbers.lhs_spec
  out_feature, in_feature, *rhs_axes = dimension_numbers.rhs_spec
  batch, _, *out_axes = dimension_numbers.out_spec
  spatial_dims = zip(
    [lhs[axis] for axis in lhs_axes],
    [rhs[axis] for axis in rhs_axes],
    [out[axis] for axis in out_axes],
    params["window_strides"],
    params["padding"],
    params["lhs_dilation"],
    params["rhs_dilation"],
    strict=True,
  )
  num_window_terms = math.prod(
    _count_terms_along_axis(*axis) for axis in spatial_dims
  )
  return 2 * num_window_terms * rhs[out_feature] * rhs[in_feature] * out[batch]


def _count_terms_along_axis(
  lhs_size: int,
  rhs_size: int,
  out_size: int,
  stride: int,
  padding: Any,
  lhs_dilation: int,
  rhs_dilation: int,
) -> int:
  """Count the pairs of kernel and input entries along one spatial axis.

  Pairs with padding or with the zeros of a dilated input don't count.
  """
  starts = np.arange(out_size)[:, None] * stride - padding[0]
  positions = starts + np.arange(rhs_size) * rhs_dilation
  # A dilated input has an entry at the multiples of the dilation only.
  in_bounds = (positions >= 0) & (positions <= (lhs_size - 1) * lhs_dilation)
  return int(np.sum(in_bounds & (positions % lhs_dilation == 0)))


_FLOP_COUNTERS = {
  "conv_general_dilated": _count_conv_flops,
  "dot_general": _count_dot_flops,
  "ragged_dot_general": _count_ragged_dot_flops,
}


def is_data_movement(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation only moves the entries of one array.

  Its transpose and its batched version do so, too. Call this function in the
  context of the equation, so that the axes of its ``shard_map`` are bound.
  """
  if eqn.primitive.name not in PERMUTING_COLLECTIVES:
    return eqn.primitive.name in DATA_MOVEMENT
  mesh_axes = jax.sharding.get_abstract_mesh().manual_axes
  return set(get_collective_axes(eqn)) <= set(mesh_axes)


def get_collective_axes(eqn: core.JaxprEqn) -> tuple[Any, ...]:
  """Return the axes along which a device reads arrays of other devices."""
  if eqn.primitive.name not in PERMUTING_COLLECTIVES:
    # All other collectives have an effect for each axis.
    effects: Any = eqn.effects
    return tuple(
      effect.name
      for effect in effects
      if type(effect).__name__ == "NamedAxisEffect"
    )
  axis_names: Any = eqn.params.get("axis_name")
  is_single = not isinstance(axis_names, (tuple, list))
  return (axis_names,) if is_single else tuple(axis_names)


def get_varying_axes(x: Any) -> frozenset[Hashable]:
  """Return the mapped axes over which an array varies, by its type."""
  return get_aval_varying_axes(jax.typeof(x))


def get_aval_varying_axes(aval: Any) -> frozenset[Hashable]:
  """Return the mapped axes over which an array of this type varies.

  Args:
    aval: the type.

  Returns:
    The names of the axes; empty outside of ``shard_map`` and ``pmap``.

  Raises:
    RuntimeError: if JAX stores the axes under another name. A wrong guess would
      let devices diverge, or count replicated gradients in a norm several
      times.
  """
  # Neither attribute is public. JAX < 0.10 has `aval.vma`: remove it once
  # jax >= 0.10.
  manual_axis_type = getattr(aval, "manual_axis_type", None)
  vma = getattr(manual_axis_type, "varying", getattr(aval, "vma", None))
  if not isinstance(vma, (frozenset, set)):
    raise RuntimeError(
      "optax_lossscale cannot read the mesh axes over which a value varies in"
      f" JAX {jax.__version__}, got the type {aval!r}. Use an older JAX until"
      " optax_lossscale supports this version. Please report it."
    )
  return frozenset(vma)


def cast_to_varying(x: jax.Array, axes: Any) -> jax.Array:
  """Cast a replicated array to the type of one that varies over these axes."""
  if hasattr(lax, "pcast"):
    return lax.pcast(x, axes, to="varying")
  # JAX 0.8.0 has no `pcast`: remove this line once jax >= 0.9.
  return lax.pvary(x, axes)  # type: ignore[attr-defined]


def is_noop_reduce_precision(eqn: core.JaxprEqn) -> bool:
  """Return whether an equation rounds an array to the format it already has."""
  if eqn.primitive.name != "reduce_precision":
    return False
  aval: Any = eqn.invars[0].aval
  finfo: Any = jnp.finfo(aval.dtype)
  bits = eqn.params.get("exponent_bits"), eqn.params.get("mantissa_bits")
  return bits == (finfo.nexp, finfo.nmant)
