"""``gradient_report``: what a dtype does to gradients with a loss scale."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _host
from optax_lossscale.diagnostics import _leaves, _numbers


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
    log2_scale_range: two integers, log2 of the smallest and of the largest loss
      scale with which no entry overflows and as few as possible underflow. None
      if all entries are zero, so that any scale will do.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.gradient_report({"w": jnp.array([1.0, 1e-9])})
    >>> report.total.underflow_fraction, report.total.log2_scale_range
    (0.5, (5, 15))
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
  log2_scale_range: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class GradientReport(_numbers.PrintedReport):
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
    50.0% of the gradient entries underflow: raise the loss scale to 2**5.
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
    rows = [_cells(row) for row in (*self.leaves, self.total)]
    table = _numbers.table(rows, left=3)
    heading = (
      f"Gradients multiplied by loss scale {self.loss_scale:g} and cast to"
      f" {self.dtype}:"
    )
    return "\n".join([self._conclusion(), heading, table])

  def _conclusion(self) -> str:
    """Say what the cast loses, and which loss scale would lose less."""
    total = self.total
    low, high = total.log2_scale_range or (None, None)
    if total.nonfinite_fraction:
      return (
        f"{_percent(total.nonfinite_fraction)} of the gradient entries are inf"
        " or NaN: find the operation with find_overflow."
      )
    if low is None or high is None:
      return "All gradient entries are zero."
    if total.overflow_fraction:
      return (
        f"{_percent(total.overflow_fraction)} of the gradient entries overflow:"
        f" lower the loss scale to 2**{high}."
      )
    lost = f"{_percent(total.underflow_fraction)} of the gradient entries"
    if not total.underflow_fraction:
      return "No gradient entry overflows or underflows."
    if self.loss_scale < 2.0**low:
      return f"{lost} underflow: raise the loss scale to 2**{low}."
    return f"{lost} underflow, as few as possible without an overflow."


@_host.may_transfer
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
    conclusion and a table. With each loss scale in the column "scale range", no
    entry overflows, and as few as possible underflow to zero.

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
    >>> for leaf in report.sorted_by("underflow_fraction").leaves:
    ...   low, high = leaf.log2_scale_range
    ...   print(f"{leaf.name}: best 2^{low} to 2^{high}")
    w: best 2^2 to 2^25
    b: best 2^-24 to 2^15
  """
  dtype = _numbers.as_small_float(dtype)
  scale = _numbers.as_scale(loss_scale)
  limits = _numbers.limits_of(dtype)
  measured = _leaves.measure_grads(
    grads,
    "gradient_report",
    lambda leaf: _measure(leaf, *_in_dtype_of(leaf, scale, limits)),
  )
  rows = [
    _row((name, leaf.shape, str(leaf.dtype), leaf.size), found, limits)
    for name, leaf, found in measured
  ]
  size = sum(leaf.size for _, leaf, _ in measured)
  in_all = _add_up([found for _, _, found in measured])
  total = _row(("total", (), "", size), in_all, limits)
  return GradientReport(str(dtype), scale, tuple(rows), total)


# The fields of a row from `amax` to `nonfinite_fraction`: two magnitudes, of
# which the smallest is inf if there is none, and then counts.
_Measured = tuple[Any, ...]


def _in_dtype_of(
  leaf: Any, scale: float, limits: _numbers.Limits
) -> np.ndarray:
  """The scale and the limits as the scalars that a leaf is compared with."""
  is_double = jnp.finfo(leaf.dtype).bits > 32
  with np.errstate(over="ignore"):  # A limit above float32's range is inf.
    return np.array((scale, *limits), np.float64 if is_double else np.float32)


@_leaves.reduce_on_device
def _measure(
  xp: Any, leaf: Any, scale: Any, zero: Any, normal: Any, inf: Any
) -> _Measured:
  finite = xp.isfinite(leaf)
  size = _leaves.magnitude(xp, leaf)
  nonzero = finite & (size > 0)
  # Zeros in place of inf and NaN, so that numpy does not warn.
  scaled = xp.where(finite, size, 0) * scale
  largest = xp.max(size, initial=0, where=nonzero)
  smallest = xp.min(size, initial=xp.inf, where=nonzero)
  flushed = nonzero & (scaled <= zero)
  subnormal = (scaled > zero) & (scaled < normal)
  masks = [size == 0, flushed, subnormal, scaled >= inf, ~finite]
  return largest, smallest, *(_leaves.count(xp, mask) for mask in masks)


def _add_up(measured: list[_Measured]) -> _Measured:
  """All leaves together, in Python numbers, which do not overflow."""
  nothing = 0.0, math.inf, 0, 0, 0, 0, 0
  largest, smallest, *counts = zip(nothing, *measured, strict=True)
  in_all = (sum(map(int, count)) for count in counts)
  return max(map(float, largest)), min(map(float, smallest)), *in_all


def _row(
  about: tuple[str, tuple[int, ...], str, int],
  found: _Measured,
  limits: _numbers.Limits,
) -> GradientStats:
  """The row of what has this name, shape, dtype and size."""
  largest, smallest, *counts = found
  shares = [int(count) / max(about[-1], 1) for count in counts]
  log2_scale_range = _log2_scale_range(largest, smallest, limits)
  smallest = smallest if largest > 0 else 0.0
  sizes = float(largest), float(smallest), *shares
  return GradientStats._make((*about, *sizes, log2_scale_range))


def _log2_scale_range(
  largest: float, smallest: float, limits: _numbers.Limits
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


def _percent(fraction: float) -> str:
  """Format a fraction that is not zero, so that it does not look like zero."""
  return f"{fraction:.1%}" if fraction >= 0.0005 else "Fewer than 0.1%"


def _cells(row: GradientStats) -> dict[str, str]:
  low, high = row.log2_scale_range or (None, None)
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
    "scale range": "any" if low is None else f"2^{low} to 2^{high}",
  }
