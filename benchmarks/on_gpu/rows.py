"""The rows of a table, each of which has a time limit.

The command ends the process of a part if one of its rows takes too long, and
starts another process for the rows after it. A row is begun before anything is
computed for it, so that the command knows the row that takes too long.
"""

from typing import Any

from on_gpu import events

Row = dict[str, Any]


class Rows:
  """Collects the rows of a table, and sends them to the command.

  Attributes:
    rows: the rows so far, in the order of the table.
  """

  def __init__(self, kind: str, title: str, finished: dict[str, list[Row]]):
    """Continue a table.

    Args:
      kind: "optimizer", "training" or "report".
      title: the title of the table.
      finished: by title, the rows that an earlier process measured, or that
        ended it.
    """
    self._kind, self._title = kind, title
    self._finished = list(finished.get(title, []))
    self.rows: list[Row] = []

  def begin(self, row: Row) -> bool:
    """Add a row.

    Args:
      row: what identifies the row; the caller adds its results.

    Returns:
      Whether to measure the row: False if an earlier process did.
    """
    if self._finished:
      self.rows.append(self._finished.pop(0))
      return False
    self.rows.append(row)
    events.tell("begin", table=self._kind, title=self._title, rows=self.rows)
    return True

  def tell(self, *, complete: bool = False) -> None:
    """Send all rows, of which the last one is no longer being measured.

    Args:
      complete: whether no row will be added.
    """
    events.tell(
      "table",
      table=self._kind,
      title=self._title,
      rows=self.rows,
      complete=complete,
    )
