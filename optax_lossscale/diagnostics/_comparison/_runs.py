"""Runs a program, each time with other products in half precision.

The outputs of each run are compared with those in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _steps, _tracing
from optax_lossscale.diagnostics._comparison import (
  _program,
  _progress,
  _rows,
  _statistics,
)

# What changes by more than this, if the operands of products are off by 2**-20
# of themselves, is rounding in float32, too.
_ROUNDING = 0.05


class Errors(NamedTuple):
  """How far the outputs of a run are from those in float32.

  Attributes:
    error: the relative error, as a norm, of the result, or of the gradients of
      one ``update``, that are furthest off.
    cosine: the smallest cosine between those of both.
    is_finite: whether there are outputs in float32 to compare with: no NaN, and
      no array that holds nothing but infs.
    of_arrays: the relative error of each array; float64[arrays].
    are_finite: whether each differs by a finite number; bool[arrays].
    shares: the share of each in the norm in float32 of the result, or of the
      gradients, that it is part of; float64[arrays].
  """

  error: float
  cosine: float
  is_finite: bool
  of_arrays: np.ndarray
  are_finite: np.ndarray
  shares: np.ndarray


class Runs:
  """The runs of a program, and what comes out of each.

  Attributes:
    notes: what was noted of each row in float32.
    half: the errors if all rows run in half precision.
    is_zero: whether all outputs are zero in float32.
    is_rounding: which arrays are zero but for rounding in float32, too;
      bool[arrays].
    names: the names of the arrays that are compared.
    told: what is to be told of the step that was run, in sentences.
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
    def run(inputs: list[Any], ways: Any) -> Any:
      empty = [_statistics.empty() for _ in rows.all]
      return _program.Program(rows, ways).run(traced.closed, inputs, empty)

    self._run = run
    every = list(range(self._count))
    outputs = traced.outputs
    self._compared = [
      i for i, out in enumerate(outputs) if out.kind in ("grads", "result")
    ]
    self.names = [outputs[i].name for i in self._compared]
    reference, self.notes = self._call([])
    in_half = self._call(every)[0]
    self.told = self._told(reference, in_half)
    self._reference = [reference[i] for i in self._compared]
    self.half = self._errors(in_half)
    self.is_zero = not any(jnp.any(x) for x in self._reference)
    off = self._errors(self._call(every, _program.OFF)[0])
    self.is_rounding = off.of_arrays > _ROUNDING

  def harm(self, in_half: list[int]) -> np.ndarray:
    """The errors if these rows alone run in half precision.

    Returns:
      That of all together, and what :meth:`blamed` says of each array;
      float64[1 + arrays].
    """
    errors = self._errors(self._call(in_half)[0])
    return np.array([errors.error, *self.blamed(errors)])

  def blamed(self, errors: Errors) -> np.ndarray:
    """The errors of the arrays for which a product is to blame.

    What is zero in float32, maybe but for rounding, has no error that says
    anything, as long as it stays finite. Its error here is 0.
    """
    says_nothing = errors.are_finite & (self.is_rounding | (errors.shares == 0))
    return np.where(says_nothing, 0.0, errors.of_arrays)

  def _told(self, reference: list[Any], in_half: list[Any]) -> list[str]:
    """What is told of the step: did ``update`` run, and see all of them."""
    sentences: list[str] = []
    for outs in reference, in_half:
      flags = self._traced.of_kind(outs, "applied")
      faults = self._traced.of_kind(outs, "unscaled")
      sentences += _steps.running(flags, faults)
    return list(dict.fromkeys(sentences))

  def _call(self, rows: list[int], way: int = _program.HALF) -> Any:
    ways = np.zeros(self._count, np.int32)
    ways[rows] = way
    out = jax.block_until_ready(self._run(self._traced.inputs, ways))
    self._progress.step(self._count + 3)
    return out

  def _errors(self, outs: list[Any]) -> Errors:
    outs = [outs[i] for i in self._compared]
    # Float64, since squares of float32 may be out of range.
    sums = np.array(_sums(self._reference, outs), np.float64)
    # The arrays of a result follow each other.
    groups = [self._traced.outputs[i].group for i in self._compared]
    _, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
      squares = sums[:, :4] * sums[:, 4:5] ** 2
      of_results = np.add.reduceat(squares, starts)
      shares = squares[:, 1] / np.repeat(of_results[:, 1], sizes)
    return Errors(
      error=max(map(_relative, of_results)),
      cosine=float(np.min(list(map(_cosine, of_results)))),  # NaN if one is.
      is_finite=bool(sums[:, 5].all()),
      of_arrays=np.array(list(map(_relative, squares))),
      are_finite=np.isfinite(squares[:, 0]),
      shares=np.sqrt(np.nan_to_num(shares)),
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
