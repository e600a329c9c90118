"""Tables in Markdown."""


def markdown(rows: list[list[str]], right_from: int | None = None) -> str:
  """A Markdown table.

  Args:
    rows: rows of cells; the first is the heading.
    right_from: the column from which on cells stand at the right.

  Returns:
    The table, with columns of one width.
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
