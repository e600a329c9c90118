"""The tables in Markdown."""

import math
from typing import Any

from shared.tables import format_cell, tabulate

SLOWER_THAN_ITS_BYTES = 1.3
Row = dict[str, Any]
# By kind of table, heading and cell of each column. A cell is empty if the row
# lacks its value; after an error, only the first and the last one are shown.
COLUMNS = {
  "optimizer": {
    "variant": "{name}",
    "time, ms": "{median:.3f} [{low:.3f}, {high:.3f}]",
    "to the first": "{relative:.2f}x",
    "skip / step": "{skip:.2f}x",
    "bytes, expected": "{expected_bytes:.1f}",
    "bytes, compiled here": "{moved:.1f}",
    "kernels": "{kernels}",
    "GB/s": "{rate:,.0f}",
    "copy of these bytes, ms": "{copy_milliseconds:.3f}",
    "verdict": "{verdict}",
    "compile, s": "{compile_seconds:.1f}",
  },
  "training": {
    "variant": "{name}",
    "time, ms": "{median:.3f} [{low:.3f}, {high:.3f}]",
    "to the first": "{relative:.2f}x",
    "peak MB": "{peak:,.1f}",
    "skipped": "{skipped}",
    "loss": "{loss:.4f}",
    "after steps": "{steps}",
    "compile, s": "{compile_seconds:.1f}",
    "error": "{error}",
  },
}


def render(kind: str, rows: list[Row]) -> str:
  """Return a table of rows of one kind, a key of ``COLUMNS``."""
  first = next((row for row in rows if "milliseconds" in row), None)
  values = [_derive(row, first) for row in rows]
  return tabulate(COLUMNS[kind], values, right_from=1)


def name(row: Row) -> str:
  """Return the label of a row."""
  return row["variant"] + (", checkpoint" if row.get("checkpoint") else "")


def summarize(row: Row) -> str:
  """Return the result of a row in a few words."""
  values = _derive(row)
  cells = "{error}", "{median:.3f} ms", ", loss {loss:.4f}"
  return "".join(format_cell(cell, values) for cell in cells)


def _derive(row: Row, first: Row | None = None) -> Row:
  """Return the values of a row for its cells."""
  label = {"name": name(row)}
  if "error" in row:
    error = row["error"].replace("|", "\\|")
    return label | {"verdict": error, "error": error}
  values = {key: value for key, value in row.items() if value is not None}
  if "peak_bytes" in row:
    values["peak"] = row["peak_bytes"] / 1e6
  if "moved_bytes" in row and "parameters" in row:
    values["moved"] = row["moved_bytes"] / row["parameters"]
  if "milliseconds" in row:
    values |= _derive_times(values, first)
  return values | label


def _derive_times(row, first):
  """Return how long a step takes, also relative to a copy of its bytes."""
  low, median, high = row["milliseconds"]
  values = {"low": low, "median": median, "high": high}
  if first:
    values["relative"] = median / first["milliseconds"][1]
  if "skipped_milliseconds" in row:
    values["skip"] = row["skipped_milliseconds"][1] / median
  # As expected, or as compiled here.
  bytes_ = row.get("expected_bytes", 0) * row.get("parameters", 0)
  bytes_ = bytes_ or row.get("moved_bytes", 0)
  copy = row.get("copy", math.nan)
  if bytes_:
    values["rate"] = bytes_ / median / 1e6
  if bytes_ and not math.isnan(copy):
    values["copy_milliseconds"] = bytes_ / copy * 1e3
    times = median / values["copy_milliseconds"]
    is_slower = times > SLOWER_THAN_ITS_BYTES
    slower = ": takes longer than its bytes" if is_slower else ""
    values["verdict"] = f"{times:.2f}x{slower}"
  return values
