"""The matrix products and convolutions of a jaxpr, and their flops."""

import math
from typing import Any, NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale.diagnostics import _sources, _walk


class Product(NamedTuple):
  """Some equal matrix products or convolutions.

  Attributes:
    primitive: JAX's name of the operation.
    operands: the dtype of what is multiplied; the wider one of two.
    accumulation: the dtype in which the products are added.
    flops: the flops of all of them.
    times: how many they are.
    place: where they stand.
  """

  primitive: str
  operands: str
  accumulation: str
  flops: int
  times: int
  place: _sources.Place


def products_in(steps: list[_walk.Step]) -> list[Product]:
  """The products, of each ``cond`` those of its largest branch."""
  found = []
  for step in steps:
    flops = _flops_of(step.eqn)
    if flops is not None:
      found.append((step, flops * step.times))
  by_branch: dict[tuple[int, int], int] = {}
  for step, flops in found:
    for branch in step.branches:
      by_branch[branch] = by_branch.get(branch, 0) + flops
  largest: dict[int, int] = {}
  for cond, i in sorted(by_branch, key=lambda branch: by_branch[branch]):
    largest[cond] = i
  return [
    _as_product(step, flops)
    for step, flops in found
    if all(largest[cond] == i for cond, i in step.branches)
  ]


def _as_product(step: _walk.Step, flops: int) -> Product:
  eqn: Any = step.eqn
  operands = [v.aval.dtype for v in eqn.invars]
  widest = max(operands, key=lambda dtype: dtype.itemsize)
  accumulation = eqn.params["preferred_element_type"]
  return Product(
    primitive=eqn.primitive.name,
    operands=str(widest),
    accumulation=str(np.dtype(accumulation or eqn.outvars[0].aval.dtype)),
    flops=flops,
    times=step.times,
    place=step.place,
  )


def _flops_of(eqn: core.JaxprEqn) -> int | None:
  """The flops of a matrix product or a convolution; None of all else.

  A multiplication and the addition that follows it are two. They are counted as
  XLA's cost analysis does it: what a convolution would multiply with its
  padding is left out.
  """
  if eqn.primitive.name == "dot_general":
    return _of_dot(eqn)
  if eqn.primitive.name == "conv_general_dilated":
    return _of_convolution(eqn)
  return None


def _of_dot(eqn: Any) -> int:
  (contracted, _), _ = eqn.params["dimension_numbers"]
  lhs = eqn.invars[0].aval.shape
  terms = math.prod(lhs[axis] for axis in contracted)
  return 2 * terms * math.prod(eqn.outvars[0].aval.shape)


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
