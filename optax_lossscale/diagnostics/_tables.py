"""Tables of text."""

from collections.abc import Mapping, Sequence


def table_of(rows: Sequence[Mapping[str, str]], left: int) -> str:
  """A table of at least one row, whose cells have the names of their columns.

  Args:
    rows: the rows, all with the same columns.
    left: how many columns are aligned to the left; the others are to the right.

  Returns:
    The lines.
  """
  return table(list(rows[0]), [list(row.values()) for row in rows], left)


def table(
  header: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> str:
  """Lines of aligned columns, of which the first ones are aligned to the left.

  Args:
    header: the first row.
    rows: the other rows, each of as many cells.
    left: how many columns are aligned to the left; the others are to the right.

  Returns:
    The lines.
  """
  lines = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
