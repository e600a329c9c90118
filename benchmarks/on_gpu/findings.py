"""The results so far, on the screen and in --out."""

import pathlib
from typing import Any

from on_gpu import events, tables


class Findings:
  """Collects events, prints them, and keeps the files up to date.

  Attributes:
    tables: by title, the kind of the table and its rows.
  """

  def __init__(self, out: pathlib.Path, facts: dict[str, Any]):
    self._out = out
    self._facts = facts
    self._lines: list[str] = []
    self._unprinted: set[str] = set()
    self._printed_rows: set[tuple[str, str]] = set()
    self.tables: dict[str, dict[str, Any]] = {}
    self.write()

  def add(self, found: dict[str, Any]) -> None:
    """Take an event of a part."""
    if found["kind"] == "facts":
      self._facts |= found["facts"]
    elif found["kind"] == "table":
      self._take(found["title"], found["table"], found["rows"])
      if found.get("complete"):
        self.print_tables()
    else:
      self.line(found["text"])
    self.write()

  def line(self, text: str) -> None:
    """Print a line, and keeps it."""
    self._lines.append(text)
    print(text, flush=True)

  def print_tables(self) -> None:
    """Print the tables that changed since the last time."""
    for title in list(self.tables):
      if title in self._unprinted:
        print(f"\n{self._section(title)}", flush=True)
    self._unprinted.clear()

  def write(self) -> None:
    """Rewrite all files."""
    json_text = events.dumps(
      {"facts": self._facts, "lines": self._lines, "tables": self.tables},
      indent=1,
    )
    facts = [f"* {name}: {value}" for name, value in self._facts.items()]
    lines = [f"* {line}" for line in self._lines]
    sections = [self._section(title) for title in self.tables]
    page = ["\n".join(facts), *sections, "\n".join(lines)]
    for name, text in (
      ("results.json", json_text),
      ("tables.md", "\n\n".join(filter(None, page))),
    ):
      # At once, so that a run that is cut off leaves whole files.
      part = self._out / f"{name}.part"
      part.write_text(text + "\n")
      part.replace(self._out / name)

  def _take(self, title, kind, rows):
    self.tables[title] = {"kind": kind, "rows": rows}
    self._unprinted.add(title)
    for row in rows:
      name, outcome = tables.name(row), tables.summarize(row)
      if outcome and (title, name) not in self._printed_rows:
        self._printed_rows.add((title, name))
        print(f"{title}: {name}: {outcome}", flush=True)

  def _section(self, title):
    table = self.tables[title]
    return f"### {title}\n\n{tables.render(table['kind'], table['rows'])}"
