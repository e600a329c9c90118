"""The matrix products and convolutions of a jaxpr, and their flops."""

import collections
from typing import Any, NamedTuple

from optax_lossscale import _jaxprs
from optax_lossscale.diagnostics._precision import _walk


class Product(NamedTuple):
  """Some equal matrix products or convolutions.

  Attributes:
    primitive: JAX's name of the operation.
    operands: the dtype of what is multiplied; the wider one of two.
    accumulation: the dtype in which the products are added.
    flops: the flops of all of them.
    step: where and how often it runs.
  """

  primitive: str
  operands: str
  accumulation: str
  flops: int
  step: _walk.Step


def products_in(steps: list[_walk.Step]) -> list[Product]:
  """The products, of each ``cond`` those of its largest branch."""
  products = [
    _as_product(step, flops * step.body.times)
    for step in steps
    if (flops := _jaxprs.flops_of(step.eqn)) is not None
  ]
  by_branch: collections.Counter[Any] = collections.Counter()
  for product in products:
    for branch in product.step.body.branches:
      by_branch[branch] += product.flops
  # The largest comes last, and takes the place of the others.
  largest = dict(sorted(by_branch, key=lambda branch: by_branch[branch]))
  return [
    product
    for product in products
    if all(largest[cond] == i for cond, i in product.step.body.branches)
  ]


def _as_product(step: _walk.Step, flops: int) -> Product:
  # What follows are the sizes of groups.
  operands: list[Any] = [v.aval for v in step.eqn.invars[:2]]
  widest = max(operands, key=lambda aval: aval.dtype.itemsize).dtype
  accumulation = _jaxprs.accumulation_of(step.eqn)
  name = _jaxprs.name_of(step.eqn)
  return Product(name, str(widest), str(accumulation), flops, step)
