"""The matrix products and convolutions of a jaxpr, and their flops."""

import collections
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _walk


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
  place: _jaxprs.Place


def products_in(steps: list[_walk.Step]) -> list[Product]:
  """The products, of each ``cond`` those of its largest branch."""
  found = []
  for step in steps:
    flops = _jaxprs.flops_of(step.eqn)
    if flops is not None:
      found.append((step, flops * step.times))
  by_branch: collections.Counter[tuple[int, int]] = collections.Counter()
  for step, flops in found:
    for branch in step.branches:
      by_branch[branch] += flops
  largest = dict(sorted(by_branch, key=lambda branch: by_branch[branch]))
  return [
    _as_product(step, flops)
    for step, flops in found
    if all(largest[cond] == i for cond, i in step.branches)
  ]


def _as_product(step: _walk.Step, flops: int) -> Product:
  eqn: Any = step.eqn
  # What follows are the sizes of groups.
  operands = [v.aval.dtype for v in eqn.invars[:2]]
  widest = max(operands, key=lambda dtype: dtype.itemsize)
  accumulation = eqn.params.get("preferred_element_type")
  return Product(
    primitive=_jaxprs.name_of(eqn),
    operands=str(widest),
    accumulation=str(np.dtype(accumulation or eqn.outvars[0].aval.dtype)),
    flops=flops,
    times=step.times,
    place=step.place,
  )
