"""Tells how far something has come that may take long."""

import sys
import time

_SILENT_SECONDS = 1.0


class Progress:
  """A line on the standard error stream that is written again and again."""

  def __init__(self, shown: bool) -> None:
    self._shown = shown
    self._begin = time.monotonic()
    self._done = 0
    self._has_begun = False

  def step(self, count: int) -> None:
    """One more step is done, of about as many."""
    self._done += 1
    seconds = time.monotonic() - self._begin
    if self._shown and seconds > _SILENT_SECONDS:
      self._has_begun = True
      text = f"compare_precision: run {self._done} of {count}, {seconds:.0f} s"
      print(f"\r{text}", end="", file=sys.stderr, flush=True)

  def end(self) -> None:
    """Ends the line."""
    if self._has_begun:
      print(file=sys.stderr)
