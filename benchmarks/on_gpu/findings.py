"""The results so far, in --out and on the screen.

They are written after each row, so that a run that is cut off keeps it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import gc
import json
import pathlib
import time
from typing import Any

from shared import clock

from on_gpu import tables

Row = dict[str, Any]
NO_TIME = "left out, since no time is left"


class Findings:
  """The contents of the files.

  Attributes:
    facts: about the machine, the device and the versions, by name.
    lines: sentences for the reader.
    tables: by title, the kind of the table and its rows.
  """

  def __init__(self, out: pathlib.Path):
    self._out = out
    self.facts: dict[str, Any] = {}
    self.lines: list[str] = []
    self.tables: dict[str, dict[str, Any]] = {}

  def add_facts(self, facts: dict[str, Any]) -> None:
    self.facts |= {key: x for key, x in facts.items() if x is not None}
    self._write()

  def add_line(self, text: str) -> None:
    """Print a line, and keep it."""
    self.lines.append(text)
    print(text, flush=True)
    self._write()

  def measure_table(
    self,
    kind: str,
    title: str,
    rows: Iterable[Row],
    make_program: Callable[[Row], clock.Program],
    *,
    rounds: int,
    steps: int,
    until: float,
  ) -> None:
    """Make the program of each row, and time the programs in rounds.

    A row that fails has an error. A row that would take too long, judged by the
    row before it, says so.

    Args:
      kind: a key of ``tables.COLUMNS``.
      title: of the table.
      rows: what identifies each row.
      make_program: takes the first steps, and adds the results to a row.
      rounds: how often the programs take turns.
      steps: that a program takes in a row.
      until: the time at which the last round should end.
    """
    table = self.tables[title] = {"kind": kind, "rows": []}
    begin_until = until - 0.3 * (until - time.time())
    programs, took = [], 0.0
    for row in rows:
      start = time.time()
      if start + took > begin_until:
        row["error"] = NO_TIME
      else:
        with clock.catch(row):
          programs.append(make_program(row))
        took = time.time() - start
        gc.collect()
      table["rows"].append(row)
      print(f"{title}: {tables.name(row)}: {tables.summarize(row)}", flush=True)
      self._write()
    clock.measure(programs, rounds=rounds, steps=steps, until=until)
    print(f"\n{self._format_table(title)}\n", flush=True)
    self._write()

  def _write(self):
    names = "facts", "lines", "tables"
    content = {name: getattr(self, name) for name in names}
    page = [
      "\n".join(f"* {name}: {value}" for name, value in self.facts.items()),
      *map(self._format_table, self.tables),
      "\n".join(f"* {line}" for line in self.lines),
    ]
    for name, text in (
      ("results.json", json.dumps(content, indent=1)),
      ("tables.md", "\n\n".join(filter(None, page))),
    ):
      part = self._out / f"{name}.part"  # Whole files replace each other.
      part.write_text(text + "\n")
      part.replace(self._out / name)

  def _format_table(self, title):
    table = self.tables[title]
    return f"### {title}\n\n{tables.render(table['kind'], table['rows'])}"


def share_time(
  cases: Mapping[str, Any], until: float, weights: Sequence[float]
) -> Iterator[tuple[str, Any, float]]:
  """Yield each case with its name, and the time at which it should end.

  Cases that end early leave their time to the cases after them.
  """
  for i, (name, case) in enumerate(cases.items()):
    now = time.time()
    yield name, case, now + (until - now) * weights[i] / sum(weights[i:])
