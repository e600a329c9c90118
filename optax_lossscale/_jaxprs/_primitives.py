"""What operations compute: products and their flops, sums, moves."""

import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

# Of what only moves numbers three questions are asked, each answered by a set.
# What may stay in half precision is the narrowest; what keeps a weight a weight
# takes most.
#
# These move one array, or leave it where it is, and so do their transposes, and
# what `vmap` makes of both. So none of them ever becomes a sum of cotangents,
# which half precision must not compute. What takes an index, or several arrays,
# is not such: under `vmap` a `dynamic_slice` becomes a gather, and a
# `concatenate` of shared and mapped arrays a broadcast, whose transposes are
# sums. The transpose of `split` is a `concatenate`.
DATA_MOVEMENT = {
  "copy", "name", "optimization_barrier", "reshape", "rev",
  "sharding_constraint", "slice", "squeeze", "transpose",
}  # fmt: skip
# So do these between the devices of a mesh. Along an axis of `vmap` they would
# become operations with an index.
PERMUTING_COLLECTIVES = {"all_to_all", "ppermute"}
# What these make of one number are copies of it.
BROADCASTING = {"broadcast_in_dim", "copy", "pvary", "reshape", "squeeze"}
# What these make of a weight is still that weight, and each of several outputs
# is a part of it.
WEIGHT_PRESERVING = DATA_MOVEMENT | BROADCASTING | {
  "all_gather", "convert_element_type", "device_put", "dynamic_slice",
  "reduce_precision", "reshard", "select_n", "split", "stop_gradient",
  "unstack",
}  # fmt: skip
_REDUCTIONS = {"reduce_sum", "reduce_window_sum", "reduce_prod"}
_CUMULATIVE_REDUCTIONS = {"cumsum", "cumprod", "cumlogsumexp"}
# These combine updates with the entry of an array that an index names. The
# gradient of an embedding, or of any other gather, is such a sum.
SCATTER_REDUCTIONS = {"scatter-add", "scatter-mul", "scatter-sub"}


def is_matmul(eqn: core.JaxprEqn) -> bool:
  """Whether this is a matrix product or a convolution."""
  return eqn.primitive.name in _FLOP_COUNTERS


def has_castable_dtypes(eqn: core.JaxprEqn) -> bool:
  """Whether this is a product that may run in another dtype.

  It multiplies matrices, or convolves. A product that contracts one element
  is none: the angles of rotary embeddings are such, and half precision has too
  few bits for them. Nor is one of two vectors, which is a sum. And it is left
  alone if its precision was chosen: the highest one, or an algorithm.
  """
  is_contraction = CONTRACTION_PREDICATES.get(
    eqn.primitive.name, lambda eqn: False
  )
  precision: Any = eqn.params.get("precision")
  precisions = precision if isinstance(precision, tuple) else (precision,)
  castable_precisions = (None, lax.Precision.DEFAULT, lax.Precision.HIGH)
  return (
    "preferred_element_type" in eqn.params
    and all(x in castable_precisions for x in precisions)
    and is_contraction(eqn)
  )


def replace_result_dtype(
  eqn: core.JaxprEqn, dtype: Any, **params: Any
) -> core.JaxprEqn:
  """The product, whose result is of this dtype."""
  params = {**eqn.params, "preferred_element_type": jnp.dtype(dtype), **params}
  return eqn.replace(params=params)


def as_highest_float32(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The product of float32 operands, as exact as a device has it."""
  # TPUs and some GPUs take float32 for a wish, unless it is the highest.
  highest = lax.Precision.HIGHEST, lax.Precision.HIGHEST
  return replace_result_dtype(eqn, jnp.float32, precision=highest)


def get_result_dtype(eqn: core.JaxprEqn) -> Any:
  """The dtype in which a product is asked to add up: that of its result."""
  aval: Any = eqn.outvars[0].aval
  preferred_dtype: Any = eqn.params.get("preferred_element_type")
  return jnp.dtype(preferred_dtype or aval.dtype)


def count_flops(eqn: core.JaxprEqn) -> int | None:
  """The flops of a matrix product or a convolution; None of all else.

  A multiplication and the addition that follows it are two. They are counted as
  XLA's cost analysis does it: what a convolution would multiply with its
  padding is left out. What cannot be counted is None, too.
  """
  flop_counter = _FLOP_COUNTERS.get(eqn.primitive.name)
  try:
    flops = flop_counter and flop_counter(eqn)
  except (AttributeError, KeyError, TypeError, ValueError):
    return None  # Another JAX describes it by other parameters.
  # Of symbolic sizes there is no number.
  return flops if isinstance(flops, int) else None


def _is_matrix_contraction(eqn: Any) -> bool:
  lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
  (contracting_dims, _), (batch_dims, _) = eqn.params["dimension_numbers"]
  # Sizes may be symbolic, so that it is not known which one is larger.
  contraction_size = math.prod(lhs.shape[i] for i in contracting_dims)
  batch_size = math.prod(lhs.shape[i] for i in batch_dims)
  return contraction_size != 1 and out.size != batch_size


def _is_nontrivial_conv(eqn: Any) -> bool:
  kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
  out_features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
  return kernel.size != out_features and out.size != 1


CONTRACTION_PREDICATES = {
  "conv_general_dilated": _is_nontrivial_conv,
  "dot_general": _is_matrix_contraction,
  "ragged_dot_general": lambda eqn: True,  # of a matrix for each expert
}


def _count_dot_flops(eqn: Any) -> int:
  (contracting_dims, _), _ = eqn.params["dimension_numbers"]
  lhs = eqn.invars[0].aval.shape
  contraction_size = math.prod(lhs[axis] for axis in contracting_dims)
  return 2 * contraction_size * math.prod(eqn.outvars[0].aval.shape)


def _count_ragged_dot_flops(eqn: Any) -> int:
  """Each row of the ragged side belongs to one group alone."""
  dimension_numbers = eqn.params["ragged_dot_dimension_numbers"]
  (contracting_dims, _), _ = dimension_numbers.dot_dimension_numbers
  lhs, _, group_sizes = (v.aval.shape for v in eqn.invars[:3])
  contraction_size = math.prod(lhs[axis] for axis in contracting_dims)
  num_multiplies = contraction_size * math.prod(eqn.outvars[0].aval.shape)
  (ragged_dim,) = dimension_numbers.lhs_ragged_dimensions
  if (
    ragged_dim in contracting_dims
  ):  # Each group contracts its share of the terms.
    num_multiplies //= group_sizes[-1]
  return 2 * num_multiplies


def _count_conv_flops(eqn: Any) -> int:
  params = eqn.params
  lhs, rhs = (v.aval.shape for v in eqn.invars)
  (out,) = (v.aval.shape for v in eqn.outvars)
  dimension_numbers = params["dimension_numbers"]
  # Of each of these, the first two are not spatial: batch and feature of the
  # input and of the output, output and input feature of the kernel.
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
  """How often an entry of the kernel meets one of the input, not padding."""
  starts = np.arange(out_size)[:, None] * stride - padding[0]
  positions = starts + np.arange(rhs_size) * rhs_dilation
  # Between the entries of a dilated input are zeros.
  in_bounds = (positions >= 0) & (positions <= (lhs_size - 1) * lhs_dilation)
  return int(np.sum(in_bounds & (positions % lhs_dilation == 0)))


_FLOP_COUNTERS = {
  "conv_general_dilated": _count_conv_flops,
  "dot_general": _count_dot_flops,
  "ragged_dot_general": _count_ragged_dot_flops,
}


def is_data_movement(eqn: core.JaxprEqn) -> bool:
  """Whether an equation and all that JAX makes of it only move one array.

  To be called where the equation stands, within its ``shard_map``.
  """
  if eqn.primitive.name not in PERMUTING_COLLECTIVES:
    return eqn.primitive.name in DATA_MOVEMENT
  axis_names: Any = eqn.params.get("axis_name")
  axis_names = (
    axis_names if isinstance(axis_names, (tuple, list)) else (axis_names,)
  )
  return set(axis_names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def is_noop_reduce_precision(eqn: core.JaxprEqn) -> bool:
  """Whether an equation rounds an array to the precision that it has."""
  aval: Any = eqn.invars[0].aval if eqn.invars else None
  if eqn.primitive.name != "reduce_precision":
    return False
  finfo: Any = jnp.finfo(aval.dtype)
  bits = eqn.params.get("exponent_bits"), eqn.params.get("mantissa_bits")
  return bits == (finfo.nexp, finfo.nmant)


def count_summands(eqn: core.JaxprEqn) -> int:
  """How many terms each result of an operation is the sum of; 1 if unknown.

  Indices are values, so that a shape only bounds a sum by index: all updates
  may have the same one.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in SCATTER_REDUCTIONS:
    return _count_colliding_updates(eqn)
  if name == "reduce_window_sum":
    window_dimensions: Any = params.get("window_dimensions", ())
    return math.prod(window_dimensions)
  axes: Any = params.get("axes", ()) if name in _REDUCTIONS else ()
  if name in _CUMULATIVE_REDUCTIONS and "axis" in params:
    axes = (params["axis"],)
  aval: Any = eqn.invars[0].aval if axes else None
  return math.prod(aval.shape[axis] for axis in axes)


def _count_colliding_updates(eqn: core.JaxprEqn) -> int:
  """How many updates may have the same index; 1 if no two of them have."""
  if eqn.params.get("unique_indices"):
    return 1
  indices: Any = eqn.invars[1].aval
  dimension_numbers = eqn.params.get("dimension_numbers")
  batching_dims = getattr(
    dimension_numbers, "scatter_indices_batching_dims", ()
  )
  # The last axis holds the index itself. Each entry along a batched axis is
  # about a part of the array that no other entry reaches.
  axis_sizes = enumerate(indices.shape[:-1])
  return math.prod(
    size for axis, size in axis_sizes if axis not in batching_dims
  )
