"""Tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Values = Mapping[str, Any]
Cell = str | Callable[[Values], str]


def tabulate(
  columns: Mapping[str, Cell],
  rows: Iterable[Values],
  right_from: int | None = None,
) -> str:
  """Return a table with a line for each row.

  Args:
    columns: by heading, the cell: a format string such as ``"{time:.1f} s"``,
      or a function of a row. A cell is empty if the row lacks the value.
    rows: the values of each row by name.
    right_from: as for ``markdown``.
  """
  cells = [[format_cell(c, row) for c in columns.values()] for row in rows]
  return markdown([list(columns), *cells], right_from)


def format_cell(cell: Cell, values: Values) -> str:
  """Return a cell of a row, as for ``tabulate``."""
  try:
    return cell.format_map(values) if isinstance(cell, str) else cell(values)
  except KeyError:
    return ""


def markdown(rows: list[list[str]], right_from: int | None = None) -> str:
  """Return a table of cells, with columns of one width.

  Args:
    rows: rows of cells; the first is the heading.
    right_from: the column from which on cells stand at the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    "| "
    + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
    + " |"
    for row in rows
  ]
  is_in_range = lambda i: right_from is not None and i >= right_from
  rule = ["-" * (w + 1) + "-:"[is_in_range(i)] for i, w in enumerate(widths)]
  lines.insert(1, "|" + "|".join(rule) + "|")
  return "\n".join(lines)
