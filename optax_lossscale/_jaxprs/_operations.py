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
_SUMS = {"reduce_sum", "reduce_window_sum", "reduce_prod"}
_CUMULATIVE = {"cumsum", "cumprod", "cumlogsumexp"}
# These combine updates with the entry of an array that an index names. The
# gradient of an embedding, or of any other gather, is such a sum.
BY_INDEX = {"scatter-add", "scatter-mul", "scatter-sub"}


def is_matrix_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a matrix product or a convolution."""
  return eqn.primitive.name in _FLOPS


def may_change_dtype(eqn: core.JaxprEqn) -> bool:
  """Whether this is a product that may run in another dtype.

  It multiplies matrices, or convolves. A product that contracts one element
  is none: the angles of rotary embeddings are such, and half precision has too
  few bits for them. Nor is one of two vectors, which is a sum. And it is left
  alone if its precision was chosen: the highest one, or an algorithm.
  """
  contracts = CONTRACTS.get(eqn.primitive.name, lambda eqn: False)
  precision: Any = eqn.params.get("precision")
  sides = precision if isinstance(precision, tuple) else (precision,)
  usual = (None, lax.Precision.DEFAULT, lax.Precision.HIGH)
  return (
    "preferred_element_type" in eqn.params
    and all(side in usual for side in sides)
    and contracts(eqn)
  )


def in_dtype(eqn: core.JaxprEqn, dtype: Any, **params: Any) -> core.JaxprEqn:
  """The product, whose result is of this dtype."""
  params = {**eqn.params, "preferred_element_type": jnp.dtype(dtype), **params}
  return eqn.replace(params=params)


def in_float32(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The product of float32 operands, as exact as a device has it."""
  # TPUs and some GPUs take float32 for a wish, unless it is the highest.
  highest = lax.Precision.HIGHEST, lax.Precision.HIGHEST
  return in_dtype(eqn, jnp.float32, precision=highest)


def result_dtype_of(eqn: core.JaxprEqn) -> Any:
  """The dtype in which a product is asked to add up: that of its result."""
  kind: Any = eqn.outvars[0].aval
  asked: Any = eqn.params.get("preferred_element_type")
  return jnp.dtype(asked or kind.dtype)


def flops_of(eqn: core.JaxprEqn) -> int | None:
  """The flops of a matrix product or a convolution; None of all else.

  A multiplication and the addition that follows it are two. They are counted as
  XLA's cost analysis does it: what a convolution would multiply with its
  padding is left out. What cannot be counted is None, too.
  """
  count = _FLOPS.get(eqn.primitive.name)
  try:
    flops = count and count(eqn)
  except (AttributeError, KeyError, TypeError, ValueError):
    return None  # Another JAX describes it by other parameters.
  # Of symbolic sizes there is no number.
  return flops if isinstance(flops, int) else None


def _multiplies_matrices(eqn: Any) -> bool:
  left, out = eqn.invars[0].aval, eqn.outvars[0].aval
  (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
  # Sizes may be symbolic, so that it is not known which one is larger.
  terms = math.prod(left.shape[i] for i in contracted)
  products = math.prod(left.shape[i] for i in batched)
  return terms != 1 and out.size != products


def _convolves(eqn: Any) -> bool:
  kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
  features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
  return kernel.size != features and out.size != 1


CONTRACTS = {
  "conv_general_dilated": _convolves,
  "dot_general": _multiplies_matrices,
  "ragged_dot_general": lambda eqn: True,  # of a matrix for each expert
}


def _of_dot(eqn: Any) -> int:
  (contracted, _), _ = eqn.params["dimension_numbers"]
  lhs = eqn.invars[0].aval.shape
  terms = math.prod(lhs[axis] for axis in contracted)
  return 2 * terms * math.prod(eqn.outvars[0].aval.shape)


def _of_ragged_dot(eqn: Any) -> int:
  """Each row of the ragged side belongs to one group alone."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  (contracted, _), _ = numbers.dot_dimension_numbers
  lhs, _, group_sizes = (v.aval.shape for v in eqn.invars[:3])
  terms = math.prod(lhs[axis] for axis in contracted)
  products = terms * math.prod(eqn.outvars[0].aval.shape)
  (ragged,) = numbers.lhs_ragged_dimensions
  if ragged in contracted:  # Each group contracts its share of the terms.
    products //= group_sizes[-1]
  return 2 * products


def _of_convolution(eqn: Any) -> int:
  params = eqn.params
  lhs, rhs = (v.aval.shape for v in eqn.invars)
  (out,) = (v.aval.shape for v in eqn.outvars)
  numbers = params["dimension_numbers"]
  # Of each of these, the first two are not spatial: batch and feature of the
  # input and of the output, output and input feature of the kernel.
  _, _, *lhs_axes = numbers.lhs_spec
  out_feature, in_feature, *rhs_axes = numbers.rhs_spec
  batch, _, *out_axes = numbers.out_spec
  spatial = zip(
    [lhs[axis] for axis in lhs_axes],
    [rhs[axis] for axis in rhs_axes],
    [out[axis] for axis in out_axes],
    params["window_strides"],
    params["padding"],
    params["lhs_dilation"],
    params["rhs_dilation"],
    strict=True,
  )
  terms = math.prod(_terms_along_axis(*axis) for axis in spatial)
  return 2 * terms * rhs[out_feature] * rhs[in_feature] * out[batch]


def _terms_along_axis(
  size: int,
  kernel: int,
  out: int,
  stride: int,
  padding: Any,
  dilation: int,
  kernel_dilation: int,
) -> int:
  """How often an entry of the kernel meets one of the input, not padding."""
  starts = np.arange(out)[:, None] * stride - padding[0]
  positions = starts + np.arange(kernel) * kernel_dilation
  # Between the entries of a dilated input are zeros.
  is_inside = (positions >= 0) & (positions <= (size - 1) * dilation)
  return int(np.sum(is_inside & (positions % dilation == 0)))


_FLOPS = {
  "conv_general_dilated": _of_convolution,
  "dot_general": _of_dot,
  "ragged_dot_general": _of_ragged_dot,
}


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


def terms_in_sum(eqn: core.JaxprEqn) -> int:
  """How many terms each result of an operation is the sum of; 1 if unknown.

  Indices are values, so that a shape only bounds a sum by index: all updates
  may have the same one.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in BY_INDEX:
    return _updates_of_scatter(eqn)
  if name == "reduce_window_sum":
    window: Any = params.get("window_dimensions", ())
    return math.prod(window)
  axes: Any = params.get("axes", ()) if name in _SUMS else ()
  if name in _CUMULATIVE and "axis" in params:
    axes = (params["axis"],)
  kind: Any = eqn.invars[0].aval if axes else None
  return math.prod(kind.shape[axis] for axis in axes)


def _updates_of_scatter(eqn: core.JaxprEqn) -> int:
  """How many updates may have the same index; 1 if no two of them have."""
  if eqn.params.get("unique_indices"):
    return 1
  indices: Any = eqn.invars[1].aval
  numbers = eqn.params.get("dimension_numbers")
  batched = getattr(numbers, "scatter_indices_batching_dims", ())
  # The last axis holds the index itself. Each entry along a batched axis is
  # about a part of the array that no other entry reaches.
  sizes = enumerate(indices.shape[:-1])
  return math.prod(size for axis, size in sizes if axis not in batched)
