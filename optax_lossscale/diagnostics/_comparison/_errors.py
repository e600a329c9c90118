"""How far the results of two runs are apart."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics._comparison import _statistics


class Errors(NamedTuple):
  """How far the results of two runs are apart.

  Attributes:
    error: the relative error, as a norm, of the result that is furthest off.
    cosine: the smallest cosine between the results of both.
    each: the relative error of each array.
    is_finite: whether the first run has results to compare with: no NaN, and no
      array that holds nothing but infs.
  """

  error: float
  cosine: float
  each: tuple[float, ...]
  is_finite: bool


def errors_of(
  reference: Sequence[Any], outs: Sequence[Any], groups: Sequence[int]
) -> Errors:
  """Compares two runs.

  Args:
    reference: the arrays that the one returned.
    outs: those of the other.
    groups: for each array, the number of the result that it is part of.

  Returns:
    An :class:`Errors`.
  """
  # Float64, since squares of float32 may be out of range.
  sums = np.array(_sums(list(reference), list(outs)), np.float64).reshape(-1, 6)
  with np.errstate(invalid="ignore", over="ignore"):
    squares = sums[:, :4] * sums[:, 4:5] ** 2
  of_groups = [
    squares[[i for i, g in enumerate(groups) if g == group]].sum(0)
    for group in dict.fromkeys(groups)
  ]
  return Errors(
    error=max(map(_relative, of_groups), default=0.0),
    cosine=min(map(_cosine, of_groups), key=_nan_first, default=1.0),
    each=tuple(map(_relative, squares)),
    is_finite=bool(sums[:, 5].all()),
  )


@jax.jit
def _sums(reference: list[Any], outs: list[Any]) -> list[Any]:
  """Of each array, four sums, the unit of both, and whether it can be compared.

  An inf that both have, such as that of a masked score, is no difference.
  """
  rows = []
  for a, b in zip(reference, outs, strict=True):
    is_same = (a == b) & ~jnp.isfinite(a)
    x, y = jnp.where(is_same, 0, a), jnp.where(is_same, 0, b)
    sizes = [
      jnp.max(jnp.abs(z), initial=0, where=jnp.isfinite(z)) for z in (x, y)
    ]
    top = jnp.maximum(*sizes)
    unit = jnp.where(top > 0, top, jnp.ones_like(top))
    x, y = x / unit.astype(x.dtype), y / unit.astype(y.dtype)
    products = [(y - x, y - x), (x, x), (y, y), (x, y)]
    is_finite = ~jnp.isnan(a).any() & (jnp.isfinite(a).any() | (a.size == 0))
    rows.append([*(_dot(*pair) for pair in products), unit, is_finite])
  return rows


def _dot(x: Any, y: Any) -> Any:
  products = jnp.real(jnp.conj(x) * y)
  dtype = jnp.promote_types(products.dtype, jnp.float32)
  return jnp.sum(products, dtype=dtype)


def _relative(sums: Any) -> float:
  difference, reference, _, _ = map(float, sums)
  if not math.isfinite(difference):
    return math.inf
  return _statistics.relative(math.sqrt(difference), math.sqrt(reference))


def _cosine(sums: Any) -> float:
  _, reference, other, both = map(float, sums)
  if reference == other == 0:
    return 1.0
  norm = math.sqrt(reference) * math.sqrt(other)
  return both / norm if norm else 0.0


def _nan_first(number: float) -> float:
  return -math.inf if math.isnan(number) else number
