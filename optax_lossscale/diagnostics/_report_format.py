"""How reports print: tables, cells of a location, and HTML for notebooks."""

from collections.abc import Mapping, Sequence
import html
from typing import Any


class PrintedReport:
  """A report that a notebook shows like ``print`` does."""

  def _repr_html_(self) -> str:
    return f"<pre>{html.escape(str(self))}</pre>"


def format_location_cells(row: Any) -> dict[str, str]:
  """Return the first two cells of a row about an operation."""
  backward_suffix = ", backward" if row.backward else ""
  return {
    "": row.primitive,
    "name": f"{row.name or 'unknown'}{backward_suffix}",
  }


def format_table(
  rows: Sequence[Mapping[str, str]], num_left_aligned: int
) -> str:
  """Format a table, with a header.

  Args:
    rows: at least one row, from the names of the columns to the cells.
    num_left_aligned: the number of columns, from the first one, that are
      aligned to the left.

  Returns:
    The lines of the table, as one string.
  """
  lines = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < num_left_aligned else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
