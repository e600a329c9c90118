"""``gradient_report``: what a dtype does to gradients with a loss scale."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_lossscale import _checks
from optax_lossscale.diagnostics import _limits, _tables
from optax_lossscale.diagnostics._gradients import _measuring


class GradientStats(NamedTuple):
  """A row of a report, about one leaf or about all leaves together.

  Attributes:
    name: the path in the tree, such as ``"layers/0/weight"``.
    shape: the shape; ``()`` for the total.
    dtype: the dtype as a string; empty for the total.
    size: how many entries there are.
    largest: the largest finite magnitude, unscaled.
    smallest: the smallest non-zero magnitude, unscaled; 0 if there is none.
    zero: the share of entries that are zero to begin with.
    flushed: the share that becomes zero in the dtype.
    subnormal: the share that becomes subnormal, and loses bits.
    overflow: the share that becomes infinite.
    nonfinite: the share that is inf or NaN to begin with.
    best_scales: two integers, log2 of the smallest and of the largest of the
      best scales, with which no entry overflows, and as few as possible are
      flushed. None if all entries are zero, since all scales are then equal.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  size: int
  largest: float
  smallest: float
  zero: float
  flushed: float
  subnormal: float
  overflow: float
  nonfinite: float
  best_scales: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class GradientReport:
  """What :func:`gradient_report` returns. It prints as a table.

  Attributes:
    dtype: the dtype that the shares are about, as a string.
    loss_scale: the loss scale that they are about.
    leaves: a :class:`GradientStats` for each leaf.
    total: a :class:`GradientStats` for all of them together.
  """

  dtype: str
  loss_scale: float
  leaves: tuple[GradientStats, ...]
  total: GradientStats

  def sorted_by(self, column: str, reverse: bool = True) -> "GradientReport":
    """Returns the report with its leaves in another order.

    Args:
      column: a field of :class:`GradientStats`.
      reverse: whether the largest come first.

    Returns:
      Another :class:`GradientReport`.

    Raises:
      ValueError: if there is no such column.
    """
    if column not in GradientStats._fields:
      raise ValueError(
        f"column must be one of {', '.join(GradientStats._fields)}, got column"
        f" = {column!r}."
      )
    # None, which stands for any scale, comes before all others.
    value = lambda row: getattr(row, column)
    key = lambda row: (value(row) is not None, value(row) or 0)
    leaves = sorted(self.leaves, key=key, reverse=reverse)
    return dataclasses.replace(self, leaves=tuple(leaves))

  def as_dict(self) -> dict[str, Any]:
    """Returns the rows as dicts: ``"leaves"`` by name, and ``"total"``."""
    return {
      "leaves": {row.name: row._asdict() for row in self.leaves},
      "total": self.total._asdict(),
    }

  def __str__(self) -> str:
    header = (
      "", "shape", "dtype", "largest", "smallest", "zero", "flushed",
      "subnormal", "overflow", "nonfinite", "best scales",
    )  # fmt: skip
    rows = [_cells(row) for row in (*self.leaves, self.total)]
    table = _tables.table(header, rows, left=3)
    return f"In {self.dtype}, times {self.loss_scale:g}:\n{table}"


def gradient_report(
  grads: Any, dtype: Any = jnp.float16, loss_scale: Any = 1.0
) -> GradientReport:
  """Says what a dtype would do to gradients with a loss scale.

  Call it outside ``jit``. Each leaf is reduced where it is, sharded or not, and
  only the counts are read back.

  Args:
    grads: a pytree of true gradients. Compute them in float32 if you can, since
      gradients that float16 has flushed already count as zeros.
    dtype: a float dtype of at most 32 bits.
    loss_scale: what they would be multiplied by: a number, or a pytree that
      holds exactly one :class:`LossScaleState`.

  Returns:
    A :class:`GradientReport` with ``leaves`` and ``total``, which prints as a
    table. Its methods are ``sorted_by("flushed")`` and ``as_dict()``. With each
    of the "best scales" in the table, no entry overflows, and as few as
    possible are flushed to zero.

  Raises:
    TypeError: if ``dtype`` is not such a dtype, if ``loss_scale`` is not a
      number, or under ``jit``.
    ValueError: if ``loss_scale`` is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> grads = {"w": jnp.array([1e-3, 1e-5, 1e-8, 0.0]), "b": jnp.ones(2)}
    >>> report = diagnostics.gradient_report(grads, jnp.float16)
    >>> print(f"{report.total.flushed:.1%} are flushed")
    16.7% are flushed
    >>> for leaf in report.sorted_by("flushed").leaves:
    ...   low, high = leaf.best_scales
    ...   print(f"{leaf.name}: {leaf.flushed:.0%}, best 2^{low} to 2^{high}")
    w: 25%, best 2^2 to 2^25
    b: 0%, best 2^-24 to 2^15
  """
  dtype = _limits.as_small_float(dtype)
  scale = _limits.as_scale(loss_scale)
  limits = _limits.limits_of(dtype)
  measured = _measuring.measure(grads, scale, limits)
  rows = [
    _row(name, leaf.shape, str(leaf.dtype), leaf.size, found, limits)
    for name, leaf, found in measured
  ]
  size = sum(leaf.size for _, leaf, _ in measured)
  in_all = _measuring.add_up([found for _, _, found in measured])
  total = _row("total", (), "", size, in_all, limits)
  return GradientReport(str(dtype), scale, tuple(rows), total)


def _row(
  name: str,
  shape: tuple[int, ...],
  dtype: str,
  size: int,
  found: _measuring.Measured,
  limits: _limits.Limits,
) -> GradientStats:
  largest, smallest = float(found.largest), float(found.smallest)
  shares = [int(number) / max(size, 1) for number in found[2:]]
  smallest_or_0 = smallest if largest > 0 else 0.0
  best_scales = _best_scales(largest, smallest, limits)
  sizes = largest, smallest_or_0, *shares
  return GradientStats._make((name, shape, dtype, size, *sizes, best_scales))


def _best_scales(
  largest: float, smallest: float, limits: _limits.Limits
) -> tuple[int, int] | None:
  if largest == 0:
    return None
  # The largest power of two that keeps the largest entry below inf, and the
  # smallest that lifts the smallest entry above zero.
  high = math.ceil(math.log2(limits.inf) - math.log2(largest)) - 1
  low = math.floor(math.log2(limits.zero) - math.log2(smallest)) + 1
  bound = round(math.log2(_checks.LARGEST_SCALE))
  high = min(max(high, -bound), bound)
  return max(min(low, high), -bound), high


def _cells(row: GradientStats) -> tuple[str, ...]:
  low, high = row.best_scales or (None, None)
  return (
    row.name,
    str(list(row.shape)) if row.dtype else str(row.size),
    row.dtype,
    f"{row.largest:.3g}",
    f"{row.smallest:.3g}",
    *(f"{share:.1%}" for share in row[6:11]),
    "any" if low is None else f"2^{low} to 2^{high}",
  )
