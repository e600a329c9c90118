"""What `compare_precision` returns."""

import dataclasses
import math
from typing import Any, NamedTuple

from optax_lossscale.diagnostics import _tables

_MOST_ROWS = 20


class ProductPrecision(NamedTuple):
  """Matrix products or convolutions of one place, in half precision.

  Attributes:
    primitive: JAX's name of the operation.
    name: what ``keep_float32=`` of :func:`optax_lossscale.autocast` takes: the
      path of the weights or the scopes, with the line if they do not tell.
    scope: the scopes around it, such as ``"Net/block1"``; often empty.
    weights: the path of the weights, such as ``"blocks/2/up"``; often empty.
    source: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to a backward pass.
    effect: the relative error of the results if these products alone run in
      half precision; inf if the results are not finite. With
      ``effects="worst"``, places that were only measured together share theirs.
    error: the relative error of what these products return, in the run in half
      precision: of their own rounding and of all before.
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
  error: float
  largest: float
  headroom: float
  lost: float
  subnormal: float
  times: int
  position: int


@dataclasses.dataclass(frozen=True)
class PrecisionComparison:
  """What :func:`compare_precision` returns. It prints as a table.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    error: the relative error of the results, as a norm: of the result that is
      furthest off, if there are several. It is inf if they are not finite.
    cosine: the smallest cosine between the results of both runs.
    is_finite: whether the results are finite in float32. If not, nothing is
      named: find_overflow tells the operation.
    standing_out: the names of places that do far more harm than all others
      together, the worst first; none, if there are no such.
    errors: the relative error of each array in the results, by its name.
    products: a :class:`ProductPrecision` for each place, the one with the
      largest effect first.
    notes: what the figures do not tell, in sentences.
  """

  dtype: str
  error: float
  cosine: float
  is_finite: bool
  standing_out: tuple[str, ...]
  errors: dict[str, float]
  products: tuple[ProductPrecision, ...]
  notes: tuple[str, ...]

  @property
  def overflowing(self) -> tuple[str, ...]:
    """The names of places that overflow in the forward pass, the largest first.

    What overflows in the backward pass alone is not among them: that is for the
    loss scale, which comes down.
    """
    rows = [r for r in self.products if r.headroom < 0 and not r.backward]
    rows.sort(key=lambda row: row.headroom)
    names = dict.fromkeys(row.name for row in rows if row.name)
    return tuple(names) if self.is_finite else ()

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
    products = [row._asdict() for row in self.products]
    return vars(self) | {"products": products, "notes": list(self.notes)}

  def __str__(self) -> str:
    return "\n".join([*self._summary(), self._table(), *self.notes])

  def _summary(self) -> list[str]:
    error = (
      f"{self.dtype} against float32: error {self.error:.2g}, cosine"
      f" {self.cosine:.7g}."
    )
    if not self.is_finite:
      return [
        "The results are not finite in float32 either: find_overflow names the"
        " operation.",
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
      lines.append(
        f"Places that overflow: {len(self.overflowing)}, see overflowing."
      )
    match list(self.standing_out):
      case []:
        lines.append("No place stands out.")
      case [name]:
        lines.append(f"Stands out: keep_float32={name!r}.")
      case names:
        lines.append(f"{len(names)} places stand out: keep_float32={names}.")
    return lines

  def _table(self) -> str:
    rows = [_cells(row) for row in self.products[:_MOST_ROWS]]
    table = _tables.table_of(rows, left=2)
    more = len(self.products) - _MOST_ROWS
    return f"{table}\nand {more} more places" if more > 0 else table


def _cells(row: ProductPrecision) -> dict[str, str]:
  return {
    "": row.primitive,
    "name": row.name + (", backward" if row.backward else ""),
    "effect": f"{row.effect:.1e}",
    "so far": f"{row.error:.1e}",
    "largest": f"{row.largest:.3g}",
    "headroom": f"{row.headroom:.1f}",
    "lost": f"{row.lost:.1%}",
    "subnormal": f"{row.subnormal:.1%}",
    "times": str(row.times),
  }
