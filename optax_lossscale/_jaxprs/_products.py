"""Matrix products and convolutions, and their flops."""

import math
from typing import Any

from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np


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


def accumulation_of(eqn: core.JaxprEqn) -> Any:
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
