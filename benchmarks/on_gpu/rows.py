"""The rows of a table, each of which has a time limit.

The command ends the process of a part if one of its rows takes too long, and
starts another process for the rows after it. A row is begun before anything is
computed for it, so that the command knows the row that takes too long.
"""

from collections.abc import Callable, Iterable
import gc
import time
from typing import Any

from shared import clock

from on_gpu import events

Row = dict[str, Any]
NO_TIME = "left out, since no time is left"


class Rows:
  """Collects the rows of a table, and sends them to the command.

  Attributes:
    rows: the rows so far, in the order of the table.
  """

  def __init__(
    self, kind: str, title: str, finished: dict[str, list[Row]] | None
  ):
    """Continue a table.

    Args:
      kind: "optimizer", "training" or "report".
      title: the title of the table.
      finished: by title, the rows that an earlier process measured, or that
        ended it.
    """
    self._kind, self._title = kind, title
    self._finished = list((finished or {}).get(title, []))
    self._took: dict[Any, float] = {}
    self.rows: list[Row] = []

  def measure_each(
    self,
    rows: Iterable[Row],
    measure: Callable[[Row], Any],
    begin_until: float | Callable[[Row], float],
  ) -> list[Any]:
    """Measure rows one by one, and send the table after each.

    A row that fails has an error. A row that would take too long, judged by the
    row before it, says so.

    Args:
      rows: what identifies each row.
      measure: adds the results to a row.
      begin_until: the time at which the last row should be measured.

    Returns:
      What `measure` returned, without the rows that failed or were finished.
    """
    results = []
    for row in rows:
      if not self.begin(row):
        continue
      kind = row.get("compiled")
      until = begin_until(row) if callable(begin_until) else begin_until
      start = time.time()
      if start + self._took.get(kind, 0.0) > until:
        row["error"] = NO_TIME
      else:
        with clock.catch(row):
          results.append(measure(row))
        self._took[kind] = time.time() - start
        gc.collect()
      self.tell()
    return results

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
