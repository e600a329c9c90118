"""The report of `compare_precision`, and which layers are outliers in it."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale.diagnostics import _numbers

_MOST_ROWS = 20
_MOST_ARRAYS = 3


# Of the squares of all errors, what is below this share is not looked into.
_SHARE = 0.3
# A place stands out if its effect is as many times the spacing of numbers at 1,
# and as many times that of all lesser places together. In float16 the first is
# an error of 0.016, at which the cosine is 0.9999. Layers in front of batch
# normalization may be far above it, but are about as bad as their neighbours.
_TIMES_EPS = 16.0
# Of a single array, it is as many times the spacing. Those of models that learn
# well are off by up to two thirds of that.
INACCURATE_EPS = 64.0
_TIMES_OTHERS = 4.0
# What many places share is no fault of one. There may always be one.
_FEW = 1 / 2
# The errors if these rows run in half precision: of all together, and then of
# each array.
Measure = Callable[[list[int]], np.ndarray]


class MatmulPrecision(NamedTuple):
  """Matmuls or convolutions of one layer, in half precision.

  Attributes:
    primitive: JAX's name of the operation.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, with the line if they do not tell.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.
    isolated_error: the relative error of the compared arrays, without
      ``noise_only_arrays``, if only these matmuls run in half precision; inf if
      an array is not finite then. With ``search="bisect"``, layers that were
      measured together share their error.
    amax: the largest magnitude of operands and results, in float32.
    log2_headroom: log2 of the largest number of the dtype over ``amax``; they
      overflow if it is below zero.
    underflow_fraction: the fraction of entries that become zero, in the operand
      or result with the largest fraction.
    subnormal_fraction: the fraction of entries that become subnormal, in the
      operand or result with the largest fraction.
    run_count: the number of times that they run.
    program_index: the index among all rows in the order of the program; 0 for
      the first.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> loss_fn = ols.autocast(lambda params, x: jnp.sum(x @ params["w"]))
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, {"w": jnp.eye(4)}, jnp.ones((2, 4)), progress=False)
    >>> row = report.matmuls[0]
    >>> row.name, row.backward, row.run_count
    ('w', False, 1)
  """

  primitive: str
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool
  isolated_error: float
  amax: float
  log2_headroom: float
  underflow_fraction: float
  subnormal_fraction: float
  run_count: int
  program_index: int


class ArrayError(NamedTuple):
  """An array that is inaccurate in half precision, but not in float32.

  Attributes:
    name: its path, such as ``"blocks/0/up"``.
    error: its relative error; inf if it is not finite, or is zero in float32.
    norm_fraction: its norm as a fraction of the norm of all arrays.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def difference(params, x):
    ...   return x @ params["w"] - 2048.0
    >>> report = diagnostics.compare_precision(
    ...   ols.autocast(difference), {"w": jnp.array([[2049.0]] * 2)},
    ...   jnp.array([[1.0, 0.0], [1.0, 0.0]]), progress=False)
    >>> report.inaccurate_arrays[0].error
    1.0
  """

  name: str
  error: float
  norm_fraction: float


@dataclasses.dataclass(frozen=True)
class PrecisionComparison(_numbers.PrintedReport):
  """The report of :func:`compare_precision`: which layers lose precision.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    target: the arrays that are compared: ``"gradients"`` that the optimizer
      receives, or ``"results"`` of the function.
    reference_is_zero: whether all compared arrays are zero in float32, so that
      there is nothing to compare.
    error: the norm of the difference over the norm in float32, of all compared
      arrays together; inf if they are not finite. If there are several results,
      or several ``update``, it is the largest error of one of them.
    cosine: the smallest cosine between the results in half precision and in
      float32.
    reference_is_finite: whether all compared arrays are finite in float32. If
      not, the report names no layer: find_overflow names the operation.
    outliers: the names of the layers that cause a far larger error of an array
      than all other layers together, the worst first; often empty.
    array_errors: the relative error of each array that is compared, by its
      path, such as ``blocks/0/up``, which is also what ``keep_float32=`` takes.
      The gradients of several ``update`` begin with ``[0]/``, ``[1]/`` and so
      on. If a key holds a ``/``, so that two paths of a tree would be spelled
      alike, each such key of this tree is quoted, as in ``'a/b'/w``.
    matmuls: a :class:`MatmulPrecision` for the matmuls and convolutions of each
      layer, the one with the largest isolated error first.
    limitations: the parts of the program that were not analyzed, in sentences.
    warnings: mistakes in the training step as a whole, in sentences: ``update``
      did not run, does not see an overflow, or receives gradients that are not
      scaled as it expects.
    noise_only_arrays: the names of arrays that are only rounding noise in
      float32, too, such as the gradient of a bias in front of a normalization.
      No layer is to blame for their errors.
    inaccurate_arrays: a :class:`ArrayError` for each of the other arrays whose
      error is above 64 times the spacing of numbers at 1 (in float16, 0.06),
      the largest first.
    suggested_log2_scale_change: log2 of the factor by which to change the loss
      scale; 0 if the loss scale is not the cause. Below zero, only the backward
      pass overflows: lower the scale by this factor. Above zero, the array with
      the largest error underflows in the backward pass: raise the scale, at
      most by this factor.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> loss_fn = ols.autocast(lambda params, x: jnp.sum(x @ params["w"]))
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, {"w": jnp.eye(4)}, jnp.full((2, 4), 7e4), progress=False)
    >>> report.overflowing, report.outliers
    (('w',), ('w',))
  """

  dtype: str
  target: str
  reference_is_zero: bool
  error: float
  cosine: float
  reference_is_finite: bool
  outliers: tuple[str, ...]
  array_errors: dict[str, float]
  matmuls: tuple[MatmulPrecision, ...]
  limitations: tuple[str, ...]
  warnings: tuple[str, ...] = ()
  noise_only_arrays: tuple[str, ...] = ()
  inaccurate_arrays: tuple[ArrayError, ...] = ()
  suggested_log2_scale_change: int = 0

  @property
  def overflowing(self) -> tuple[str, ...]:
    """The names of the layers that overflow in the forward pass.

    The layer with the largest numbers comes first. Layers that overflow only in
    the backward pass are not included: a lower loss scale helps them. A
    derivative inside the loss, such as a force or the derivative of a
    differential equation, is part of the forward pass: if it overflows, the
    loss is not finite at any scale.
    """
    rows = sorted(self._overflowing_rows(), key=lambda row: row.log2_headroom)
    return tuple(dict.fromkeys(row.name for row in rows))

  def _overflowing_rows(self) -> list[MatmulPrecision]:
    rows = [r for r in self.matmuls if r.log2_headroom < 0 and not r.backward]
    return [row for row in rows if row.name and self.reference_is_finite]

  def top_outliers(self, n: int = 1) -> tuple[str, ...]:
    """Returns the names of the worst outliers.

    Args:
      n: the largest number of names.

    Returns:
      At most ``n`` names for ``keep_float32=`` of
      :func:`optax_lossscale.autocast`, the worst first. There are none if no
      layer is much worse than the others.
    """
    return self.outliers[:n]

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    rows = {
      name: [row._asdict() for row in getattr(self, name)]
      for name in ("inaccurate_arrays", "matmuls")
    }
    lists = {
      "limitations": list(self.limitations),
      "warnings": list(self.warnings),
    }
    return vars(self) | rows | lists

  def __str__(self) -> str:
    lines = [*self.warnings, *self._conclusion(), self._figures()]
    lines += self.limitations
    # After an overflow, most errors are infinite, and say nothing.
    overflows = self.overflowing or self.suggested_log2_scale_change < 0
    if self.reference_is_finite and not overflows:
      lines += self._arrays()
    return "\n".join([*lines, self._table()])

  def _conclusion(self) -> list[str]:
    """Say what loses the precision, and what to do, in a sentence or a few."""
    if self.reference_is_zero:
      return [
        f"All {self.target} are zero in float32, so there is nothing to"
        " compare. Pass a batch that has gradients, and a step that applies"
        " them."
      ]
    if not self.reference_is_finite:
      return [
        f"The {self.target} are not finite in float32 either: find_overflow"
        " names the operation."
      ]
    change = self.suggested_log2_scale_change
    if change < 0:
      return [
        "Only the backward pass overflows: lower the loss scale by"
        f" 2**{-change}, and compare again."
      ]
    lines = []
    if self.overflowing:
      lines.append(self._forward_overflows())
    if change > 0:
      name = self.inaccurate_arrays[0].name or "The result"
      lines.append(
        f"{name} underflows in the backward pass: raise the loss scale by up to"
        f" 2**{change}."
      )
    # If the forward pass overflows, an infinite error is no layer's own fault.
    blamed = {
      row.name for row in self.matmuls if math.isinf(row.isolated_error)
    }
    excused = blamed if self.overflowing else ()
    outliers = [x for x in self.outliers if x not in excused]
    if outliers:
      label = "Outlier" if len(outliers) == 1 else f"{len(outliers)} outliers"
      lines.append(f"{label}: {_keep(outliers)}.")
    return lines or ["No single layer dominates the error."]

  def _forward_overflows(self) -> str:
    if len(self.overflowing) == 1:
      (name,) = self.overflowing
      return (
        f"1 layer overflows in the forward pass: {name}. Keep it in float32:"
        f" {_keep(self.overflowing)}."
      )
    first = min(self._overflowing_rows(), key=lambda row: row.program_index)
    keep = _keep(self.overflowing)
    if len(self.overflowing) > _MOST_ARRAYS:
      keep = "keep_float32=report.overflowing"
    return (
      f"{len(self.overflowing)} layers overflow in the forward pass, first"
      f" {first.name}. Keep them in float32: {keep}."
    )

  def _figures(self) -> str:
    """Return the errors of all arrays together."""
    count = len(self.array_errors)
    arrays = self.target if count != 1 else self.target.removesuffix("s")
    if self.target == "gradients":
      arrays += " that the optimizer receives"
    return (
      f"Relative error in {self.dtype}: {self.error:.2g}, cosine"
      f" {self.cosine:.7g} ({count} {arrays})."
    )

  def _arrays(self) -> list[str]:
    """Return the largest errors, and the arrays that were not judged."""
    rows = [
      f"  {name or 'the result'}: {error:.2g} ({fraction:.2g} of the norm)"
      for name, error, fraction in self.inaccurate_arrays[:_MOST_ARRAYS]
    ]
    lines = ["Largest relative errors:", *rows] if rows else []
    more = len(self.inaccurate_arrays) - len(rows)
    lines += [f"  (+{more} more: report.inaccurate_arrays)"] if more else []
    judged = {array.name for array in self.inaccurate_arrays}
    noise = [
      x or "the result" for x in self.noise_only_arrays if x not in judged
    ]
    if noise:
      shown, more = noise[:_MOST_ARRAYS], len(noise) - _MOST_ARRAYS
      lines.append(
        "Only rounding noise in float32, too, so no layer is to blame:"
        f" {', '.join(shown)}{f' and {more} more' if more > 0 else ''}."
      )
    return lines

  def _table(self) -> str:
    rows = [_cells(row) for row in self.matmuls[:_MOST_ROWS]]
    table = _numbers.table(rows, left=2)
    more = len(self.matmuls) - _MOST_ROWS
    return (
      f"{table}\n(+{more} more rows: report.matmuls)" if more > 0 else table
    )


def _keep(names: Sequence[str]) -> str:
  """Return the argument of `autocast` that keeps layers in float32."""
  value = names[0] if len(names) == 1 else list(names)
  return f"keep_float32={value!r}"


def _cells(row: MatmulPrecision) -> dict[str, str]:
  return _numbers.where(row) | {
    "error alone": f"{row.isolated_error:.1e}",
    "amax": f"{row.amax:.3g}",
    "log2 headroom": f"{row.log2_headroom:.1f}",
    "underflow": f"{row.underflow_fraction:.1%}",
    "subnormal": f"{row.subnormal_fraction:.1%}",
    "count": str(row.run_count),
  }


def backward_excess(report: PrecisionComparison) -> int:
  """Return log2 of the factor by which the loss scale is too large.

  The loss scale is too large if the backward pass overflows, and the forward
  pass does not. Then no layer is to blame. Otherwise, return 0.
  """
  backward = [row.log2_headroom for row in report.matmuls if row.backward]
  over = -min(backward, default=0.0)
  is_finite = report.reference_is_finite and not report.overflowing
  return math.ceil(over) if is_finite and 0 < over < math.inf else 0


def bisect(
  measure: Measure, places: Sequence[list[int]], total: np.ndarray, eps: float
) -> dict[int, np.ndarray]:
  """The largest errors, by bisection: in far fewer runs than there are rows.

  Errors that have nothing to do with each other add up in squares. So a half of
  the places that makes less than a share of the whole is not looked into.

  Args:
    measure: the errors if these rows run in half precision.
    places: the rows of each place.
    total: the errors if all of them do.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    For each row, its effects; of what was not looked into its equal share.
  """
  # No place can stand out for another array.
  looked_at = total > INACCURATE_EPS * eps
  looked_at[0] = True
  effects: dict[int, np.ndarray] = {}
  parts = [(places, total)]
  while parts:
    part, effect = parts.pop()
    rows = [row for rows in part for row in rows]
    is_large = (effect > math.sqrt(_SHARE) * total) | ~np.isfinite(effect)
    matters = bool((is_large & looked_at).any())
    if len(rows) == 1 or not matters:
      effects.update((row, effect / math.sqrt(len(rows))) for row in rows)
    elif len(part) <= 1:
      effects.update((row, measure([row])) for row in rows)
    else:
      middle = len(part) // 2
      for half in part[:middle], part[middle:]:
        parts.append((half, measure([row for rows in half for row in rows])))
  return effects


def find_outliers(
  names: Sequence[str], effects: np.ndarray, eps: float
) -> tuple[str, ...]:
  """The few places that do far more harm to an array than all others together.

  Each array is judged by itself: an optimizer such as Adam takes each relative
  to itself, so that a small gradient moves its parameters as far as any other.

  Args:
    names: the name of the place of each product, of which there is one at
      least.
    effects: the effect of each on all arrays together, and on each by itself;
      float64[products, 1 + arrays].
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    Their names, the worst first; of equal ones, the one that came first. What
    makes an array that is not finite is always among them.
  """
  places = list(dict.fromkeys(names))
  sizes = np.zeros((len(places), effects.shape[1]))
  for name, effect in zip(names, effects, strict=True):
    i = places.index(name)
    sizes[i] = np.hypot(sizes[i], effect)
  worst: dict[str, float] = {}
  for column, its_sizes in enumerate(sizes.T):
    least = (INACCURATE_EPS if column else _TIMES_EPS) * eps
    for i in _far_above_the_others(its_sizes, least):
      worst[places[i]] = max(worst.get(places[i], 0.0), its_sizes[i])
  found = sorted(worst, key=places.index)
  found.sort(key=lambda name: worst[name], reverse=True)
  return tuple(filter(None, found))


def _far_above_the_others(sizes: np.ndarray, least: float) -> np.ndarray:
  """Which few are larger than the least, and far larger than all others."""
  order = np.argsort(-sizes, kind="stable")
  count = int(np.sum(~np.isfinite(sizes)))
  for i in range(count, max(1, math.floor(_FEW * len(sizes)))):
    others = math.hypot(*sizes[order[i + 1 :]])
    if sizes[order[i]] > max(least, _TIMES_OTHERS * others):
      count = i + 1
  return order[:count]
