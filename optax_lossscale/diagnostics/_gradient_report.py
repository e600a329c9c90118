"""``gradient_report``: how many gradients underflow and overflow in a cast.

Each leaf is reduced on its devices to a few numbers: the smallest and the
largest magnitude, and counts of entries between the thresholds of the dtype.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale.diagnostics import _dtype_limits, _leaves, _reports


class GradientStats(NamedTuple):
  """A row of a gradient report: one leaf, or all leaves together.

  Attributes:
    name: the path in the tree, such as ``"layers/0/weight"``.
    shape: the shape; ``()`` for the total.
    dtype: the dtype as a string; empty for the total.
    size: the number of entries.
    amax: the largest finite magnitude, unscaled.
    smallest_nonzero: the smallest non-zero magnitude, unscaled; 0 if there is
      none.
    zero_fraction: the fraction of entries that are zero before the cast.
    underflow_fraction: the fraction that becomes zero in the dtype.
    subnormal_fraction: the fraction that becomes subnormal, and loses bits.
    overflow_fraction: the fraction that becomes infinite.
    nonfinite_fraction: the fraction that is inf or NaN before the cast.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.gradient_report({"w": jnp.array([1.0, 1e-9])})
    >>> report.total.underflow_fraction
    0.5
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  size: int
  amax: float
  smallest_nonzero: float
  zero_fraction: float
  underflow_fraction: float
  subnormal_fraction: float
  overflow_fraction: float
  nonfinite_fraction: float


@dataclasses.dataclass(frozen=True)
class GradientReport(_reports.PrintedReport):
  """The report of :func:`gradient_report`: how gradients survive a cast.

  Attributes:
    dtype: the dtype to which the gradients are cast, as a string.
    loss_scale: the loss scale by which they are multiplied before.
    leaves: a :class:`GradientStats` for each leaf.
    total: a :class:`GradientStats` for all leaves together.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.gradient_report({"w": jnp.array([1.0, 1e-9])})
    >>> print(str(report).splitlines()[0])
    50.0% of the gradient entries underflow: find a loss scale with check_step.
  """

  dtype: str
  loss_scale: float
  leaves: tuple[GradientStats, ...]
  total: GradientStats

  def as_dict(self) -> dict[str, Any]:
    """Returns the rows as dicts: ``"leaves"`` by name, and ``"total"``."""
    return {
      "leaves": {row.name: row._asdict() for row in self.leaves},
      "total": self.total._asdict(),
    }

  def __str__(self) -> str:
    rows = [_as_cells(row) for row in (*self.leaves, self.total)]
    table = _reports.format_table(rows, num_left_aligned=3)
    heading = (
      f"Gradients multiplied by loss scale {self.loss_scale:g} and cast to"
      f" {self.dtype}:"
    )
    return "\n".join([self._format_conclusion(), heading, table])

  def _format_conclusion(self) -> str:
    """Return the fraction that the cast loses, and what to do."""
    total = self.total
    if total.nonfinite_fraction:
      return (
        f"{_format_entries(total.nonfinite_fraction)} are inf or NaN: find the"
        " operation with find_overflow."
      )
    if total.overflow_fraction:
      return (
        f"{_format_entries(total.overflow_fraction)} overflow: lower the loss"
        " scale."
      )
    if total.underflow_fraction:
      return (
        f"{_format_entries(total.underflow_fraction)} underflow: find a loss"
        " scale with check_step."
      )
    if total.amax == 0:
      return "All gradient entries are zero."
    return "No gradient entry overflows or underflows."


@_transfer_guard.allow_transfers
def gradient_report(
  grads: Any, dtype: Any = jnp.float16, loss_scale: Any = 1.0
) -> GradientReport:
  """Reports how many gradients underflow and overflow in a dtype.

  Call it outside ``jit``. Each leaf is reduced on its devices, sharded or not,
  and only the counts are transferred to the host.

  Args:
    grads: a pytree of unscaled gradients. Compute them in float32 if you can:
      gradients that have underflowed in float16 count as zeros.
    dtype: a float dtype of at most 32 bits.
    loss_scale: the loss scale by which the gradients are multiplied before the
      cast: a number, or a pytree that holds exactly one
      :class:`LossScaleState`.

  Returns:
    A :class:`GradientReport` with ``leaves`` and ``total``. It prints a
    conclusion and a table.

  Raises:
    TypeError: if ``dtype`` is not a float dtype of at most 32 bits, if
      ``loss_scale`` is not a number, or under ``jit``.
    ValueError: if ``loss_scale`` is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> grads = {"w": jnp.array([1e-3, 1e-5, 1e-8, 0.0]), "b": jnp.ones(2)}
    >>> report = diagnostics.gradient_report(grads, jnp.float16)
    >>> print(f"{report.total.underflow_fraction:.1%} underflow")
    16.7% underflow
    >>> for leaf in report.leaves:
    ...   print(f"{leaf.name}: {leaf.underflow_fraction:.1%}")
    b: 0.0%
    w: 25.0%
  """
  dtype = _dtype_limits.check_float_dtype(dtype)
  scale = _leaves.to_float_scale(loss_scale)
  limits = _dtype_limits.get_cast_thresholds(dtype)
  leaf_stats = _leaves.measure_grads(
    grads,
    "gradient_report",
    lambda leaf: _measure_leaf(leaf, *_cast_thresholds(leaf, scale, limits)),
  )
  rows = [
    _as_row((name, leaf.shape, str(leaf.dtype), leaf.size), stats)
    for name, leaf, stats in leaf_stats
  ]
  total_size = sum(leaf.size for _, leaf, _ in leaf_stats)
  total_stats = _merge_stats([stats for _, _, stats in leaf_stats])
  total = _as_row(("total", (), "", total_size), total_stats)
  return GradientReport(str(dtype), scale, tuple(rows), total)


# The largest magnitude, the smallest nonzero magnitude (inf if there is none),
# and the counts for the fractions of a row, in the order of its fields.
_LeafStats = tuple[Any, ...]


def _cast_thresholds(
  leaf: Any, scale: float, limits: _dtype_limits.CastThresholds
) -> np.ndarray:
  """Return the scale and the limits in the dtype that a leaf is measured in."""
  is_double = jnp.finfo(leaf.dtype).bits > 32
  with np.errstate(over="ignore"):  # A limit above float32's range is inf.
    return np.array((scale, *limits), np.float64 if is_double else np.float32)


@_leaves.reduce_on_device
def _measure_leaf(
  xp: Any,
  leaf: Any,
  scale: Any,
  underflow_threshold: Any,
  smallest_normal: Any,
  overflow_threshold: Any,
) -> _LeafStats:
  is_finite = xp.isfinite(leaf)
  magnitude = _leaves.magnitude(xp, leaf)
  is_nonzero = is_finite & (magnitude > 0)
  # Zeros in place of inf and NaN, so that numpy does not warn.
  scaled_magnitude = xp.where(is_finite, magnitude, 0) * scale
  amax = xp.max(magnitude, initial=0, where=is_nonzero)
  amin = xp.min(magnitude, initial=xp.inf, where=is_nonzero)
  is_flushed = is_nonzero & (scaled_magnitude <= underflow_threshold)
  is_subnormal = (scaled_magnitude > underflow_threshold) & (
    scaled_magnitude < smallest_normal
  )
  masks = [
    magnitude == 0,
    is_flushed,
    is_subnormal,
    scaled_magnitude >= overflow_threshold,
    ~is_finite,
  ]
  return amax, amin, *(_leaves.count_true(xp, mask) for mask in masks)


def _merge_stats(leaf_stats: list[_LeafStats]) -> _LeafStats:
  """Merge the statistics of all leaves, in Python integers of any size."""
  identity = 0.0, math.inf, 0, 0, 0, 0, 0
  amaxes, amins, *counts = zip(identity, *leaf_stats, strict=True)
  total_counts = (sum(map(int, count)) for count in counts)
  return max(map(float, amaxes)), min(map(float, amins)), *total_counts


def _as_row(
  header: tuple[str, tuple[int, ...], str, int],
  stats: _LeafStats,
) -> GradientStats:
  """Return a row, given its name, shape, dtype and size, and its statistics."""
  amax, amin, *counts = stats
  fractions = [int(count) / max(header[-1], 1) for count in counts]
  smallest_nonzero = float(amin) if amax > 0 else 0.0
  return GradientStats._make(
    (*header, float(amax), smallest_nonzero, *fractions)
  )


def _format_entries(fraction: float) -> str:
  """Format a nonzero fraction so that it does not look like zero."""
  percentage = f"{fraction:.1%}" if fraction >= 0.0005 else "Fewer than 0.1%"
  return f"{percentage} of the gradient entries"


def _as_cells(row: GradientStats) -> dict[str, str]:
  return {
    "": row.name,
    "shape": str(list(row.shape)) if row.dtype else str(row.size),
    "dtype": row.dtype,
    "amax": f"{row.amax:.3g}",
    "smallest nonzero": f"{row.smallest_nonzero:.3g}",
    "zero": f"{row.zero_fraction:.1%}",
    "underflow": f"{row.underflow_fraction:.1%}",
    "subnormal": f"{row.subnormal_fraction:.1%}",
    "overflow": f"{row.overflow_fraction:.1%}",
    "nonfinite": f"{row.nonfinite_fraction:.1%}",
  }
