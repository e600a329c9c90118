"""What `compare_precision` returns, and how effects of products are judged."""

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
    isolated_error: the relative error of what is compared, without the arrays
      that are ``noise_only_arrays``, if these
      matmuls alone run in half precision; inf if that is not finite. With
      ``search="bisect"``, layers that were only measured together share theirs.
    amax: the largest magnitude of operands and results, in float32.
    log2_headroom: how many binades are left above ``amax``; below zero it
      overflows.
    underflow_fraction: the fraction of entries that become zero, of that
      operand or result that loses most.
    subnormal_fraction: the fraction of entries that become subnormal, of the
      same kind.
    run_count: how often they run.
    program_index: their index among all rows in the order of the program; 0 for
      the first.
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
  """An array that is inaccurate in half precision, and not in float32.

  Attributes:
    name: its path, such as ``"blocks/0/up"``.
    error: its relative error; inf if it is not finite, or is zero in float32.
    norm_fraction: its norm as a fraction of the norm of all arrays.
  """

  name: str
  error: float
  norm_fraction: float


@dataclasses.dataclass(frozen=True)
class PrecisionComparison:
  """What :func:`compare_precision` returns. It prints as a table.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    target: what is compared: ``"gradients"``, those that the optimizer
      receives, or ``"results"``, those of the function.
    reference_is_zero: whether all of it is zero in float32: then there is
      nothing to compare.
    error: the relative error of what is compared, as a norm: of the result, or
      of the gradients of one ``update``, that are furthest off, if there are
      several. It is inf if they are not finite.
    cosine: the smallest cosine between those of both runs.
    reference_is_finite: whether all of it is finite in float32. If not, nothing
      is named: find_overflow names the operation.
    outliers: the names of layers that do far more harm to an array than all
      others together, the worst first; empty, if no layer does.
    array_errors: the relative error of each array that is compared, by its
      path, such as ``blocks/0/up``, which is also what ``keep_float32=`` takes.
      The gradients of several ``update`` begin with ``[0]/``, ``[1]/`` and so
      on. If a key holds a ``/``, so that two paths of a tree would be spelled
      alike, each such key of this tree is quoted, as in ``'a/b'/w``.
    matmuls: a :class:`MatmulPrecision` for the matmuls and convolutions of each
      layer, the one with the largest isolated error first.
    limitations: what the figures do not tell, in sentences.
    warnings: what is wrong with the training step as a whole, in sentences:
      ``update`` did not run, or does not see an overflow, or is given gradients
      of another scale.
    noise_only_arrays: the names of arrays that are nothing but rounding in
      float32, too, such as the gradient of a bias in front of a normalization.
      No layer is to blame for their errors.
    inaccurate_arrays: a :class:`ArrayError` for each of the others whose error
      is above 64 times the spacing of numbers at 1 (in float16, 0.06), the
      largest first.
    suggested_log2_scale_change: by how many binades to change the loss scale; 0
      if the loss scale is not the cause. Below zero, only the backward pass
      overflows: lower the scale by as much. Above zero, the array with the
      largest error underflows in the backward pass: raise the scale, by as much
      at most.
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
    """The names of places that overflow in the forward pass, the largest first.

    What overflows in the backward pass alone is not among them: that is for the
    loss scale, which comes down. A derivative inside of the loss, such as that
    of a differential equation or a force, is part of the forward pass: if it
    overflows, the loss is not finite at any scale.
    """
    rows = sorted(self._overflowing_rows(), key=lambda row: row.log2_headroom)
    return tuple(dict.fromkeys(row.name for row in rows))

  def _overflowing_rows(self) -> list[MatmulPrecision]:
    rows = [r for r in self.matmuls if r.log2_headroom < 0 and not r.backward]
    return [row for row in rows if row.name and self.reference_is_finite]

  def top_outliers(self, n: int = 1) -> tuple[str, ...]:
    """The names of the layers that do most harm.

    Args:
      n: how many at most.

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
    head = [*self.warnings, *self.limitations, *self._summary()]
    return "\n".join([*head, self._table()])

  def _summary(self) -> list[str]:
    is_step = self.target == "gradients"
    error = (
      f"{self.dtype} against float32: error {self.error:.2g}, cosine"
      f" {self.cosine:.7g},\nof the {self.target}"
      f"{' that the optimizer is given' if is_step else ''}, arrays:"
      f" {len(self.array_errors)}."
    )
    if self.reference_is_zero:
      return [
        f"All {self.target} are zero in float32, so that nothing can be"
        " compared: take a batch that has gradients, and a step that applies"
        " them.",
        error,
      ]
    if not self.reference_is_finite:
      return [
        f"The {self.target} are not finite in float32 either: find_overflow"
        " names the operation.",
        error,
      ]
    change = self.suggested_log2_scale_change
    if change < 0:
      return [
        "Only the backward pass overflows: lower the loss scale by"
        f" 2**{-change}, and compare again.",
        error,
      ]
    lines = [error]
    if self.overflowing:
      first = min(self._overflowing_rows(), key=lambda row: row.program_index)
      lines.append(
        f"Places that overflow: {len(self.overflowing)}, see overflowing. The"
        f" first along the program: keep_float32={first.name!r}."
      )
    lines += self._arrays()
    match list(self.outliers):
      case []:
        alone = " alone" if self.inaccurate_arrays else ""
        lines.append(f"No place{alone} stands out.")
      case [name]:
        lines.append(f"Stands out: keep_float32={name!r}.")
      case names:
        lines.append(f"{len(names)} places stand out: keep_float32={names}.")
    return lines

  def _arrays(self) -> list[str]:
    """What is told of the arrays that are far off."""
    told = [
      f"  {name or 'the result'}: error {error:.2g}, {fraction:.2g} of the norm"
      for name, error, fraction in self.inaccurate_arrays[:_MOST_ARRAYS]
    ]
    more = len(self.inaccurate_arrays) - len(told)
    told += [f"  and {more} more"] if more else []
    lines = ["Furthest off:", *told] if told else []
    if self.suggested_log2_scale_change > 0:
      lines.append(
        "The first is lost in the backward pass: a larger loss scale helps, by"
        f" up to 2**{self.suggested_log2_scale_change}."
      )
    judged = {array.name for array in self.inaccurate_arrays}
    noise = [
      x or "the result" for x in self.noise_only_arrays if x not in judged
    ]
    if noise:
      named, more = noise[:_MOST_ARRAYS], len(noise) - _MOST_ARRAYS
      lines.append(
        "Nothing but rounding in float32, too, so that no place is to blame:"
        f" {', '.join(named)}{f' and {more} more' if more > 0 else ''}."
      )
    return lines

  def _table(self) -> str:
    rows = [_cells(row) for row in self.matmuls[:_MOST_ROWS]]
    table = _numbers.table(rows, left=2)
    more = len(self.matmuls) - _MOST_ROWS
    return f"{table}\nand {more} more places" if more > 0 else table


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
  """How many binades the loss scale is too large; 0 if that is not it.

  It is too large if the backward pass overflows, and the forward pass does not.
  Then no layer is to blame.
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
