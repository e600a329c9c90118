"""``plot_precision``: where along a program half precision does harm."""

import math
from typing import Any

import numpy as np

from optax_lossscale import diagnostics
from optax_lossscale.plots import _figures

_TALLEST = 40.0  # in binades: what is infinite must be somewhere
_PLAIN, _WORST = "tab:gray", "tab:red"

_Rows = list[diagnostics.ProductPrecision]


def plot_precision(
  report: diagnostics.PrecisionComparison, *, axes: Any = None
) -> Any:
  """Draws what half precision does at each place of a program.

  Above is the effect of each place: the error of the results if its products
  alone run in half precision. Below is how many binades are left above its
  largest number. Places are in the order of the program. Those that stand out
  or overflow are red, and named.

  Args:
    report: what :func:`~optax_lossscale.diagnostics.compare_precision`
      returned.
    axes: two matplotlib axes to draw on, by default those of a new figure.

  Returns:
    The two matplotlib axes.

  Raises:
    ImportError: if matplotlib is not installed.
    TypeError: if ``report`` is something else.
  """
  if not isinstance(report, diagnostics.PrecisionComparison):
    raise TypeError(
      "report must be what compare_precision returned, got report ="
      f" {report!r}."
    )
  axes = _figures.axes_or_new(axes, "plot_precision", rows=2)
  top, bottom = axes
  rows = sorted(report.products, key=lambda row: row.position)
  bad = {*report.worst(len(rows)), *report.overflowing}
  colors = [_WORST if row.name in bad else _PLAIN for row in rows]
  _draw_effects(top, rows, colors, report.dtype)
  _draw_headroom(bottom, rows, colors, report.dtype)
  _name_bad(top, rows, bad)
  return axes


def _draw_effects(ax: Any, rows: _Rows, colors: list[str], dtype: str) -> None:
  known = [row.effect for row in rows if 0 < row.effect < math.inf]
  low, high = min(known, default=1e-4) / 3, 10 * max([*known, 1.0])
  heights = [min(max(row.effect, low), high) for row in rows]
  hatches = ["//" if row.effect == math.inf else "" for row in rows]
  ax.bar(range(len(rows)), heights, color=colors, hatch=hatches)
  ax.set_yscale("log")
  ax.set_ylim(low, high)
  ax.set_ylabel(f"error, if it\nalone is in {dtype}")
  if any(hatches):
    ax.set_title("hatched: the results are not finite", fontsize="small")


def _draw_headroom(ax: Any, rows: _Rows, colors: list[str], dtype: str) -> None:
  heights = np.clip([row.headroom for row in rows], -_TALLEST, _TALLEST)
  ax.bar(range(len(rows)), heights, color=colors)
  ax.axhline(0, color="black", linewidth=0.8)
  first = next((i for i, row in enumerate(rows) if row.backward), None)
  if first is not None:
    style = {"color": "tab:blue", "alpha": 0.1, "linewidth": 0}
    ax.axvspan(first - 0.5, len(rows) - 0.5, label="backward", **style)
    ax.legend(fontsize="small", loc="upper right")
  ax.set_xlabel("products, in the order of the program")
  ax.set_ylabel(f"binades left\nin {dtype}")


def _name_bad(ax: Any, rows: _Rows, bad: set[str]) -> None:
  """Names each place once, beside its highest bar."""
  shown = dict.fromkeys(row.name for row in rows if row.name in bad)
  box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
  style = {"va": "top", "color": _WORST, "fontsize": "small", "bbox": box}
  where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
  for level, name in enumerate(shown):
    bars = [i for i, row in enumerate(rows) if row.name == name]
    i = max(bars, key=lambda i: rows[i].effect)
    at = i, 0.93 - 0.1 * (level % 8)
    side, shift = ("right", -8) if 2 * i > len(rows) else ("left", 8)
    ax.annotate(name, at, xytext=(shift, 0), ha=side, **where, **style)
