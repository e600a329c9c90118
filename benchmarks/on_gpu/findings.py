"""The results so far, in --out and on the screen.

The command and the process of a part work on the same files, one after the
other. They are written after each row, so that a run that is cut off keeps it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import gc
import json
import math
import os
import pathlib
import sys
import threading
import time
from typing import Any, TextIO

from shared import clock

from on_gpu import tables

Row = dict[str, Any]
NO_TIME = "left out, since no time is left"
# The row that remains if the process ends before the measurement does.
BROKE_OFF = "not measured: its process broke off, and log.txt may say why"


class Findings:
  """The contents of the files.

  Attributes:
    facts: about the machine, the device and the versions, by name.
    lines: sentences for the reader.
    tables: by title, the kind of the table and its rows.
  """

  def __init__(self, out: pathlib.Path, row_seconds: float = 120.0):
    """Read the files, if there are any."""
    self.row_seconds = row_seconds
    self._out = out
    self._screen: TextIO | None = None
    file = out / "results.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    self.facts: dict[str, Any] = found.get("facts", {})
    self.lines: list[str] = found.get("lines", [])
    self.tables: dict[str, dict[str, Any]] = found.get("tables", {})

  def reserve_screen(self) -> None:
    """Print on the screen, and let libraries print into the log."""
    self._screen = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

  def print(self, text: str) -> None:
    print(text, file=self._screen or sys.stdout, flush=True)

  def add_facts(self, facts: dict[str, Any]) -> None:
    self.facts |= {key: x for key, x in facts.items() if x is not None}
    self.write()

  def add_line(self, text: str) -> None:
    """Print a line, and keep it."""
    self.lines.append(text)
    self.print(text)
    self.write()

  def print_table(self, title: str) -> None:
    self.print(f"\n{self._format_table(title)}\n")

  def write(self) -> None:
    """Rewrite all files."""
    names = "facts", "lines", "tables"
    content = spell_out({name: getattr(self, name) for name in names})
    page = [
      "\n".join(f"* {name}: {value}" for name, value in self.facts.items()),
      *map(self._format_table, self.tables),
      "\n".join(f"* {line}" for line in self.lines),
    ]
    for name, text in (
      ("results.json", json.dumps(content, allow_nan=False, indent=1)),
      ("tables.md", "\n\n".join(filter(None, page))),
    ):
      part = self._out / f"{name}.part"  # Whole files replace each other.
      part.write_text(text + "\n")
      part.replace(self._out / name)

  def _format_table(self, title):
    table = self.tables[title]
    return f"### {title}\n\n{tables.render(table['kind'], table['rows'])}"


class Table:
  """A table whose rows have a time limit.

  A compiler cannot be interrupted, so a row that takes too long ends the
  process. The command starts another one, which measures the rows after it.

  Attributes:
    rows: the rows so far, those of an earlier process included.
  """

  def __init__(self, findings: Findings, kind: str, title: str):
    self._findings, self._title = findings, title
    table = findings.tables.setdefault(title, {"kind": kind, "rows": []})
    self.rows: list[Row] = table["rows"]
    self._num_finished = len(self.rows)

  def measure_each(
    self,
    rows: Iterable[Row],
    measure: Callable[[Row], Any],
    begin_until: Callable[[Row], float],
  ) -> list[Any]:
    """Measure rows one by one, and print and write each.

    A row that fails has an error. A row that would take too long, judged by the
    row before it, says so.

    Args:
      rows: what identifies each row.
      measure: adds the results to a row.
      begin_until: the time at which a row should be measured.

    Returns:
      What `measure` returned for the rows that did not fail.
    """
    results, took = [], {}
    for row in list(rows)[self._num_finished :]:
      self.rows.append(row | {"error": BROKE_OFF})
      self._findings.write()
      limit = threading.Timer(self._findings.row_seconds, self._give_up)
      limit.start()
      kind, start = row.get("compiled"), time.time()
      if start + took.get(kind, 0.0) > begin_until(row):
        row["error"] = NO_TIME
      else:
        with clock.catch(row):
          results.append(measure(row))
        took[kind] = time.time() - start
        gc.collect()
      limit.cancel()
      self._replace_last(row)
    return results

  def _give_up(self):
    """End the process, since the last row takes too long."""
    error = f"not measured: more than {self._findings.row_seconds:g} s"
    self._replace_last(self.rows[-1] | {"error": error})
    os._exit(1)

  def _replace_last(self, row):
    self.rows[-1] = row
    outcome = tables.summarize(row)
    self._findings.print(f"{self._title}: {tables.name(row)}: {outcome}")
    self._findings.write()

  def take_turns(self, programs, size, steps: int, until: float) -> None:
    """Time programs in rounds, and print the table."""
    clock.measure(programs, rounds=size.rounds, steps=steps, until=until)
    self.finish()

  def finish(self) -> None:
    """Print and write the table."""
    self._findings.print_table(self._title)
    self._findings.write()


def share_time(
  cases: Mapping[str, Any], until: float
) -> Iterator[tuple[str, Any, float]]:
  """Yield each case with its name, and the time at which it should end."""
  for i, (name, case) in enumerate(cases.items()):
    now = time.time()
    yield name, case, now + (until - now) / (len(cases) - i)


def spell_out(value: Any) -> Any:
  """Return a value for JSON, in which NaN and infinities are strings."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, dict):
    return {key: spell_out(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [spell_out(item) for item in value]
  return value
