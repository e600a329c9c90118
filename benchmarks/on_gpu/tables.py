"""The tables in Markdown."""

from collections.abc import Callable
import math
from typing import Any

from shared.tables import markdown

SLOWER_THAN_ITS_BYTES = 1.3
Row = dict[str, Any]


def render(kind: str, rows: list[Row]) -> str:
  """A table of rows of one kind, "optimizer", "training" or "report"."""
  columns = COLUMNS[kind]
  firsts: dict[int | None, Row] = {}  # by the number of leaves
  for row in rows:
    if "milliseconds" in row:
      firsts.setdefault(row.get("leaves"), row)
  cells = [
    [
      cell(row, firsts.get(row.get("leaves"))) if _shown(name, row) else ""
      for name, cell in columns
    ]
    for row in rows
  ]
  return markdown([[name for name, _ in columns], *cells], right_from=1)


def name(row: Row) -> str:
  """Return the label of a row."""
  added = [word for word in ("checkpoint", "compiled") if row.get(word)]
  if row.get("leaves"):
    added.append(f"{row['leaves']} leaves")
  return ", ".join([row["variant"], *added])


def summarize(row: Row) -> str:
  """Return the result of a row in a few words, or "" if there is none yet."""
  if "error" in row:
    return row["error"]
  if "seconds" in row:
    return f"{row['seconds']:.1f} s"
  if "milliseconds" not in row:
    return ""
  loss = _number("loss", ".4f")(row, None)
  return f"{row['milliseconds'][1]:.3f} ms" + (f", loss {loss}" if loss else "")


def compute_bytes_milliseconds(row: Row) -> float | None:
  """How long a copy of the bytes of a step takes on this device."""
  bytes_, copy = _bytes(row), row.get("copy")
  if not bytes_ or not isinstance(copy, int | float) or math.isnan(copy):
    return None
  return bytes_ / copy * 1e3


def verdict(row: Row) -> str:
  """Whether the time of a step is that of its bytes."""
  if "error" in row:
    return row["error"].replace("|", "\\|")
  least = compute_bytes_milliseconds(row)
  if least is None or "milliseconds" not in row:
    return ""
  times = row["milliseconds"][1] / least
  if times > SLOWER_THAN_ITS_BYTES:
    return f"{times:.2f}x: takes longer than its bytes"
  return f"{times:.2f}x"


def _bytes(row):
  """Return the bytes of a step: as expected, or as compiled here, or None."""
  if row.get("expected_bytes"):
    return row["expected_bytes"] * row["parameters"]
  return row.get("moved_bytes")


def _shown(column, row):
  """Return whether a cell has a value; after an error only the last one has."""
  return "error" not in row or column in ("variant", "verdict", "error")


def _time(row, first):
  if "milliseconds" not in row:
    return ""
  low, middle, high = row["milliseconds"]
  return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _relative(row, first):
  if first is None or "milliseconds" not in row:
    return ""
  return f"{row['milliseconds'][1] / first['milliseconds'][1]:.2f}x"


def _skipped(row, first):
  if "skipped_milliseconds" not in row or "milliseconds" not in row:
    return ""
  return f"{row['skipped_milliseconds'][1] / row['milliseconds'][1]:.2f}x"


def _number(
  key: str, spec: str, factor: float = 1, suffix: str = ""
) -> Callable[[Row, Row | None], str]:
  def cell(row, first):
    value = row.get(key)
    if value is None or isinstance(value, str):
      return value or ""
    return format(value * factor, spec) + suffix

  return cell


def _moved(row, first):
  if "moved_bytes" not in row:
    return ""
  return f"{row['moved_bytes'] / row['parameters']:.1f}"


def _format_bytes_time(row, first):
  least = compute_bytes_milliseconds(row)
  return "" if least is None else f"{least:.3f}"


def _rate(row, first):
  bytes_, times = _bytes(row), row.get("milliseconds")
  return f"{bytes_ / times[1] / 1e6:,.0f}" if bytes_ and times else ""


OPTIMIZER = [
  ("variant", lambda row, first: name(row)),
  ("time, ms", _time),
  ("to the first", _relative),
  ("skip / step", _skipped),
  ("bytes, expected", _number("expected_bytes", ".1f")),
  ("bytes, compiled here", _moved),
  ("kernels", _number("kernels", "d")),
  ("GB/s", _rate),
  ("copy of these bytes, ms", _format_bytes_time),
  ("verdict", lambda row, first: verdict(row)),
  ("compile, s", _number("compile_seconds", ".1f")),
]
TRAINING = [
  ("variant", lambda row, first: name(row)),
  ("time, ms", _time),
  ("to the first", _relative),
  ("peak MB", _number("peak_bytes", ",.1f", 1e-6)),
  ("skipped", _number("skipped", "d")),
  ("loss", _number("loss", ".4f")),
  ("after steps", _number("steps", "d")),
  ("first step or compile, s", _number("compile_seconds", ".1f")),
  ("error", lambda row, first: verdict(row) if "error" in row else ""),
]
REPORT = [
  ("variant", lambda row, first: name(row)),
  ("time, s", _number("seconds", ".1f")),
  ("to compiling", _number("to_compiling", ".1f", suffix="x")),
  ("of it tracing, s", _number("trace_seconds", ".1f")),
  ("problems", _number("problems", "d")),
  ("error", lambda row, first: verdict(row) if "error" in row else ""),
]
COLUMNS = {"optimizer": OPTIMIZER, "training": TRAINING, "report": REPORT}
