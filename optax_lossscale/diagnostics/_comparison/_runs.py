"""Runs a program, each time with other products in half precision.

The results of each run are compared with those in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _tracing
from optax_lossscale.diagnostics._comparison import (
  _program,
  _progress,
  _rows,
  _statistics,
)


class Errors(NamedTuple):
  """How far the results of a run are from those in float32.

  Attributes:
    error: the relative error, as a norm, of the result that is furthest off.
    cosine: the smallest cosine between the results of both.
    is_finite: whether there are results in float32 to compare with: no NaN, and
      no array that holds nothing but infs.
    errors: the relative error of each array in the results, by its name.
  """

  error: float
  cosine: float
  is_finite: bool
  errors: dict[str, float]


class Runs:
  """The runs of a program, and what comes out of each.

  Attributes:
    exact_notes: what was noted of each row in float32.
    half_notes: the same in half precision.
    half: the errors of the results in half precision.
  """

  def __init__(
    self,
    traced: _tracing.Traced,
    rows: _rows.Rows,
    progress: _progress.Progress,
  ) -> None:
    self._traced = traced
    self._count = len(rows.all)
    self._progress = progress

    def run(inputs: list[Any], in_half: Any, noting: bool) -> Any:
      empty = [_statistics.empty() for _ in rows.all if noting]
      return _program.Program(rows, in_half).run(traced.closed, inputs, empty)

    self._run = jax.jit(run, static_argnames="noting")
    self._reference, self.exact_notes = self._call([], noting=True)
    everything = list(range(self._count))
    outs, self.half_notes = self._call(everything, noting=True)
    self.half = self._errors(outs)

  def effect(self, in_half: list[int]) -> float:
    """The error of the results if these rows alone run in half precision."""
    return self._errors(self._call(in_half, noting=False)[0]).error

  def _call(self, in_half: list[int], noting: bool) -> Any:
    flags = np.isin(np.arange(self._count), in_half)
    out = jax.block_until_ready(self._run(self._traced.inputs, flags, noting))
    self._progress.step(self._count + 2)
    return out

  def _errors(self, outs: list[Any]) -> Errors:
    # Float64, since squares of float32 may be out of range.
    sums = np.array(_sums(self._reference, outs), np.float64)
    # The arrays of a result follow each other.
    _, starts = np.unique(self._traced.groups, return_index=True)
    with np.errstate(invalid="ignore", over="ignore"):
      squares = sums[:, :4] * sums[:, 4:5] ** 2
      of_results = np.add.reduceat(squares, starts)
    each = map(_relative, squares)
    return Errors(
      error=max(map(_relative, of_results)),
      cosine=float(np.min(list(map(_cosine, of_results)))),  # NaN if one is.
      is_finite=bool(sums[:, 5].all()),
      errors=dict(zip(self._traced.results, each, strict=True)),
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
  difference, reference, _, _ = sums
  return _statistics.relative(math.sqrt(difference), math.sqrt(reference))


def _cosine(sums: Any) -> float:
  _, reference, other, both = map(float, sums)
  if reference == other == 0:
    return 1.0
  norm = math.sqrt(reference) * math.sqrt(other)
  return both / norm if norm else 0.0
