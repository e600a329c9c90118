"""Tables of text."""

from collections.abc import Mapping, Sequence
from typing import Any


def where(row: Any) -> dict[str, str]:
  """The first two cells of a row that is about an operation in some place."""
  backward = ", backward" if row.backward else ""
  return {"": row.primitive, "name": f"{row.name or 'unknown'}{backward}"}


def table(rows: Sequence[Mapping[str, str]], left: int) -> str:
  """A table of at least one row, whose cells have the names of their columns.

  Args:
    rows: the rows, all with the same columns.
    left: how many columns are aligned to the left; the others are to the right.

  Returns:
    The lines.
  """
  lines = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
