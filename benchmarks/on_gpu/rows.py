"""The rows of a table, each of which has a time limit.

The command ends the process of a part if one of its rows takes too long, and
starts another process for the rows after it. A row is begun before anything is
computed for it, so that the command knows the row that takes too long.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import gc
import time
from typing import Any

from shared import clock

from on_gpu import events

Row = dict[str, Any]
NO_TIME = "left out, since no time is left"


def share_time(
  cases: Mapping[str, Any], until: float, library: str
) -> Iterator[tuple[str, Any, float]]:
  """Yield each case with the time at which it should end, while there is time.

  Args:
    cases: by name.
    until: the time at which the last case should end.
    library: the library that is measured.
  """
  for i, (name, case) in enumerate(cases.items()):
    now = time.time()
    share = (until - now) / (len(cases) - i)
    if share < 1:
      events.line(f"Left out, since no time is left: {name} in {library}")
    else:
      yield name, case, now + share


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
    self.rows: list[Row] = []

  def measure_each(
    self,
    rows: Iterable[Row],
    measure: Callable[[Row], Any],
    begin_until: Callable[[Row], float],
  ) -> list[Any]:
    """Measure rows one by one, and send the table after each.

    A row that fails has an error. A row that would take too long, judged by the
    row before it, says so.

    Args:
      rows: what identifies each row.
      measure: adds the results to a row.
      begin_until: the time at which a row should be measured.

    Returns:
      What `measure` returned, without the rows that failed or were finished.
    """
    results, took = [], {}
    for row in rows:
      if not self.begin(row):
        continue
      kind = row.get("compiled")
      start = time.time()
      if start + took.get(kind, 0.0) > begin_until(row):
        row["error"] = NO_TIME
      else:
        with clock.catch(row):
          results.append(measure(row))
        took[kind] = time.time() - start
        gc.collect()
      self.tell()
    return results

  def begin(self, row: Row) -> bool:
    """Add a row, and return whether to measure it.

    It is not measured if an earlier process did.
    """
    if self._finished:
      self.rows.append(self._finished.pop(0))
      return False
    self.rows.append(row)
    events.tell("begin", table=self._kind, title=self._title, rows=self.rows)
    return True

  def take_turns(self, programs, size, steps: int, until: float) -> None:
    """Time programs in rounds, and send the complete table."""
    clock.measure(programs, rounds=size.rounds, steps=steps, until=until)
    self.tell(complete=True)

  def tell(self, *, complete: bool = False) -> None:
    """Send all rows; those of a table that is complete are all there."""
    events.tell(
      "table",
      table=self._kind,
      title=self._title,
      rows=self.rows,
      complete=complete,
    )
