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
FAR_OFF = 64.0
_TIMES_OTHERS = 4.0
# What many places share is no fault of one. There may always be one.
_FEW = 1 / 2
# The errors if these rows run in half precision: of all together, and then of
# each array.
Measure = Callable[[list[int]], np.ndarray]


class ProductPrecision(NamedTuple):
  """Matrix products or convolutions of one place, in half precision.

  Attributes:
    primitive: JAX's name of the operation.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, with the line if they do not tell.
    scope: the scopes around it, such as ``"Net/block1"``; often empty.
    weights: the path of the weights, such as ``"blocks/2/up"``; often empty.
    source: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.
    effect: the relative error of what is compared, without the arrays that are
      ``rounding`` in float32, too, if these products alone run in half
      precision; inf if that is not finite. With ``effects="worst"``, places
      that were only measured together share theirs.
    largest: the largest magnitude of operands and results, in float32.
    headroom: how many binades are left above it; below zero it overflows.
    lost: the share of entries that become zero, of that operand or result that
      loses most.
    subnormal: the share of entries that become subnormal, of the same kind.
    times: how often they run.
    position: which of all places it is along the program; 0 for the first.
  """

  primitive: str
  name: str
  scope: str
  weights: str
  source: str
  backward: bool
  effect: float
  largest: float
  headroom: float
  lost: float
  subnormal: float
  times: int
  position: int


class FarOff(NamedTuple):
  """An array that is far off in half precision, and not in float32.

  Attributes:
    name: the way to it.
    error: its relative error; inf if it is not finite, or is zero in float32.
    share: its share of the norm of all arrays.
  """

  name: str
  error: float
  share: float


@dataclasses.dataclass(frozen=True)
class PrecisionComparison:
  """What :func:`compare_precision` returns. It prints as a table.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    compared: ``"gradients"``, those that the optimizer is given, or
      ``"results"``, those of the function.
    is_zero: whether all of it is zero in float32: then there is nothing to
      compare.
    error: the relative error of what is compared, as a norm: of the result, or
      of the gradients of one ``update``, that are furthest off, if there are
      several. It is inf if they are not finite.
    cosine: the smallest cosine between those of both runs.
    is_finite: whether all of it is finite in float32. If not, nothing is named:
      find_overflow tells the operation.
    standing_out: the names of places that do far more harm to an array than all
      others together, the worst first; none, if there are no such.
    errors: the relative error of each array that is compared, by the way to it:
      that of the gradients of a second ``update`` begins with ``[1]``.
    products: a :class:`ProductPrecision` for each place, the one with the
      largest effect first.
    notes: what the figures do not tell, in sentences.
    warnings: what is wrong with the training step as a whole, in sentences:
      ``update`` did not run, or does not see an overflow, or is given gradients
      of another scale.
    rounding: the names of arrays that are nothing but rounding in float32, too,
      such as the gradient of a bias in front of a normalization. Nobody is to
      blame for their errors.
    far_off: a :class:`FarOff` for each of the others whose error is above 64
      times the spacing of numbers at 1 (in float16, 0.06), the largest first.
    shortfall: how many binades the loss scale can be raised by, if the array
      that is furthest off is lost in the backward pass below what half
      precision holds; 0 if that is not it.
  """

  dtype: str
  compared: str
  is_zero: bool
  error: float
  cosine: float
  is_finite: bool
  standing_out: tuple[str, ...]
  errors: dict[str, float]
  products: tuple[ProductPrecision, ...]
  notes: tuple[str, ...]
  warnings: tuple[str, ...] = ()
  rounding: tuple[str, ...] = ()
  far_off: tuple[FarOff, ...] = ()
  shortfall: int = 0

  @property
  def overflowing(self) -> tuple[str, ...]:
    """The names of places that overflow in the forward pass, the largest first.

    What overflows in the backward pass alone is not among them: that is for the
    loss scale, which comes down. A derivative inside of the loss, such as that
    of a differential equation or a force, is part of the forward pass: if it
    overflows, the loss is not finite at any scale.
    """
    rows = sorted(self._overflowing_rows(), key=lambda row: row.headroom)
    return tuple(dict.fromkeys(row.name for row in rows))

  @property
  def excess(self) -> int:
    """How many binades the loss scale is too large; 0 if that is not it.

    It is too large if the backward pass overflows, and the forward pass does
    not. Then no place stands out.
    """
    backward = [row.headroom for row in self.products if row.backward]
    over = -min(backward, default=0.0)
    is_it = self.is_finite and not self.overflowing and 0 < over < math.inf
    return math.ceil(over) if is_it else 0

  def _overflowing_rows(self) -> list[ProductPrecision]:
    rows = [r for r in self.products if r.headroom < 0 and not r.backward]
    return [row for row in rows if row.name and self.is_finite]

  def worst(self, n: int = 1) -> tuple[str, ...]:
    """The names of the places that do most harm, and stand out.

    Args:
      n: how many at most.

    Returns:
      At most ``n`` names for ``keep_float32=`` of
      :func:`optax_lossscale.autocast`, the worst first. There are none if no
      place is much worse than the others.
    """
    return self.standing_out[:n]

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    rows = {
      name: [row._asdict() for row in getattr(self, name)]
      for name in ("far_off", "products")
    }
    lists = {"notes": list(self.notes), "warnings": list(self.warnings)}
    return vars(self) | rows | lists

  def __str__(self) -> str:
    head = [*self.warnings, *self.notes, *self._summary()]
    return "\n".join([*head, self._table()])

  def _summary(self) -> list[str]:
    is_step = self.compared == "gradients"
    error = (
      f"{self.dtype} against float32: error {self.error:.2g}, cosine"
      f" {self.cosine:.7g},\nof the {self.compared}"
      f"{' that the optimizer is given' if is_step else ''}, arrays:"
      f" {len(self.errors)}."
    )
    if self.is_zero:
      return [
        f"All {self.compared} are zero in float32, so that nothing can be"
        " compared: take a batch that has gradients, and a step that applies"
        " them.",
        error,
      ]
    if not self.is_finite:
      return [
        f"The {self.compared} are not finite in float32 either: find_overflow"
        " names the operation.",
        error,
      ]
    if self.excess:
      return [
        "Only the backward pass overflows: lower the loss scale by"
        f" 2**{self.excess}, and compare again.",
        error,
      ]
    lines = [error]
    if self.overflowing:
      first = min(self._overflowing_rows(), key=lambda row: row.position)
      lines.append(
        f"Places that overflow: {len(self.overflowing)}, see overflowing. The"
        f" first along the program: keep_float32={first.name!r}."
      )
    lines += self._arrays()
    match list(self.standing_out):
      case []:
        alone = " alone" if self.far_off else ""
        lines.append(f"No place{alone} stands out.")
      case [name]:
        lines.append(f"Stands out: keep_float32={name!r}.")
      case names:
        lines.append(f"{len(names)} places stand out: keep_float32={names}.")
    return lines

  def _arrays(self) -> list[str]:
    """What is told of the arrays that are far off."""
    told = [
      f"  {name or 'the result'}: error {error:.2g}, {share:.2g} of the norm"
      for name, error, share in self.far_off[:_MOST_ARRAYS]
    ]
    more = len(self.far_off) - len(told)
    told += [f"  and {more} more"] if more else []
    lines = ["Furthest off:", *told] if told else []
    if self.shortfall:
      lines.append(
        "The first is lost in the backward pass: a larger loss scale helps, by"
        f" up to 2**{self.shortfall}."
      )
    judged = {array.name for array in self.far_off}
    noise = [x or "the result" for x in self.rounding if x not in judged]
    if noise:
      named, more = noise[:_MOST_ARRAYS], len(noise) - _MOST_ARRAYS
      lines.append(
        "Nothing but rounding in float32, too, so that no place is to blame:"
        f" {', '.join(named)}{f' and {more} more' if more > 0 else ''}."
      )
    return lines

  def _table(self) -> str:
    rows = [_cells(row) for row in self.products[:_MOST_ROWS]]
    table = _numbers.table(rows, left=2)
    more = len(self.products) - _MOST_ROWS
    return f"{table}\nand {more} more places" if more > 0 else table


def _cells(row: ProductPrecision) -> dict[str, str]:
  return _numbers.where(row) | {
    "effect": f"{row.effect:.1e}",
    "largest": f"{row.largest:.3g}",
    "headroom": f"{row.headroom:.1f}",
    "lost": f"{row.lost:.1%}",
    "subnormal": f"{row.subnormal:.1%}",
    "times": str(row.times),
  }


def worst(
  measure: Measure, places: Sequence[list[int]], total: np.ndarray, eps: float
) -> dict[int, np.ndarray]:
  """The largest effects, by halves: in far fewer runs than there are rows.

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
  looked_at = total > FAR_OFF * eps
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


def standing_out(
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
    least = (FAR_OFF if column else _TIMES_EPS) * eps
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
