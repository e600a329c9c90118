"""Runs a program, each time with other products in half precision.

The outputs of each run are compared with those in float32.
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
  """How far the outputs of a run are from those in float32.

  Attributes:
    error: the relative error, as a norm, of the result, or of the gradients of
      one ``update``, that are furthest off.
    cosine: the smallest cosine between those of both.
    is_finite: whether there are outputs in float32 to compare with: no NaN, and
      no array that holds nothing but infs.
    errors: the relative error of each array, by its name.
  """

  error: float
  cosine: float
  is_finite: bool
  errors: dict[str, float]


class Runs:
  """The runs of a program, and what comes out of each.

  Attributes:
    notes: what was noted of each row in float32.
    half: the errors if all rows run in half precision.
    is_zero: whether all outputs are zero in float32.
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

    @jax.jit
    def run(inputs: list[Any], in_half: Any) -> Any:
      empty = [_statistics.empty() for _ in rows.all]
      return _program.Program(rows, in_half).run(traced.closed, inputs, empty)

    self._run = run
    self._reference, self.notes = self._call([])
    self.half = self._errors(self._call(list(range(self._count)))[0])
    self.is_zero = not any(jnp.any(x) for x in self._reference)

  def effect(self, in_half: list[int]) -> float:
    """The error of the outputs if these rows alone run in half precision."""
    return self._errors(self._call(in_half)[0]).error

  def _call(self, in_half: list[int]) -> Any:
    flags = np.isin(np.arange(self._count), in_half)
    out = jax.block_until_ready(self._run(self._traced.inputs, flags))
    self._progress.step(self._count + 2)
    return out

  def _errors(self, outs: list[Any]) -> Errors:
    # Float64, since squares of float32 may be out of range.
    sums = np.array(_sums(self._reference, outs), np.float64)
    # The arrays of a result follow each other.
    groups = [output.group for output in self._traced.outputs]
    _, starts = np.unique(groups, return_index=True)
    with np.errstate(invalid="ignore", over="ignore"):
      squares = sums[:, :4] * sums[:, 4:5] ** 2
      of_results = np.add.reduceat(squares, starts)
    each = map(_relative, squares)
    names = [output.name for output in self._traced.outputs]
    return Errors(
      error=max(map(_relative, of_results)),
      cosine=float(np.min(list(map(_cosine, of_results)))),  # NaN if one is.
      is_finite=bool(sums[:, 5].all()),
      errors=dict(zip(names, each, strict=True)),
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
  if not math.isfinite(difference):
    return math.inf
  if reference == 0:
    return 0.0 if difference == 0 else math.inf
  return math.sqrt(difference) / math.sqrt(reference)


def _cosine(sums: Any) -> float:
  _, reference, other, both = map(float, sums)
  if reference == other == 0:
    return 1.0
  norm = math.sqrt(reference) * math.sqrt(other)
  return both / norm if norm else 0.0
