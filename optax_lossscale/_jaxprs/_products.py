"""Matrix products and convolutions, and their flops."""

import math
from typing import Any

from jax.extend import core
import numpy as np


def is_matrix_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a matrix product or a convolution."""
  return eqn.primitive.name in _FLOPS


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
