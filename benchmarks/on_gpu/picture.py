"""The times of all tables in one picture, if Matplotlib is installed."""

import pathlib
from typing import Any

from on_gpu.tables import compute_bytes_milliseconds, name


def draw(tables: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
  """A panel for each table: medians, quartiles, and the time of the bytes.

  Args:
    tables: by title, the kind and the rows.
    path: where to write.
  """
  from matplotlib.figure import Figure  # Needs no display.

  measured = {
    title: [row for row in table["rows"] if "milliseconds" in row]
    for title, table in tables.items()
  }
  measured = {title: rows for title, rows in measured.items() if rows}
  if not measured:
    return
  lengths = [len(rows) + 2 for rows in measured.values()]
  figure = Figure(figsize=(9, 0.3 * sum(lengths)), layout="constrained")
  axes = figure.subplots(len(measured), 1, height_ratios=lengths, squeeze=False)
  for axis, (title, rows) in zip(axes[:, 0], measured.items(), strict=True):
    _panel(axis, title, rows)
  figure.savefig(path, dpi=100)


def _panel(axis, title, rows):
  low, middle, high = zip(*(row["milliseconds"] for row in rows), strict=True)
  spread = [
    [m - x for m, x in zip(middle, low, strict=True)],
    [x - m for m, x in zip(middle, high, strict=True)],
  ]
  axis.barh(range(len(rows)), middle, xerr=spread)
  for i, row in enumerate(rows):
    if least := compute_bytes_milliseconds(row):
      axis.plot([least] * 2, [i - 0.4, i + 0.4], color="black")
  axis.set_yticks(range(len(rows)), [name(row) for row in rows])
  axis.invert_yaxis()
  axis.set_title(f"{title}: ms (black: a copy of its bytes)", fontsize="small")
