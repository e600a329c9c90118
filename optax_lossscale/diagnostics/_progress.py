"""A progress line on the standard error stream, for slow functions."""

import sys
import time

_DELAY_SECONDS = 1.0


class ProgressLine:
  """Shows which program a slow function compiles or runs, after a second.

  On a terminal, each line replaces the line before, and :meth:`close` erases
  the last one. Elsewhere, such as in a log file, all lines remain.

  Args:
    caller: the name of the public function, with which each line begins.
    is_enabled: whether to write anything.
  """

  def __init__(self, caller: str, is_enabled: bool) -> None:
    self._caller = caller
    self._is_enabled = is_enabled
    self._start_time = time.monotonic()
    self._line_width = 0

  def set_description(self, description: str) -> None:
    """Write what begins now, and the time since the start."""
    elapsed = time.monotonic() - self._start_time
    if self._is_enabled and elapsed >= _DELAY_SECONDS:
      self._write_line(f"{self._caller}: {description}, {elapsed:.0f} s")

  def close(self) -> None:
    """Erase the line on a terminal."""
    if self._line_width:
      self._write_line("")

  def _write_line(self, line: str) -> None:
    if sys.stderr.isatty():
      # The spaces cover the rest of a longer line.
      padded_line = line.ljust(self._line_width)
      print(padded_line, end="\r", file=sys.stderr, flush=True)
      self._line_width = len(line)
    else:
      print(line, file=sys.stderr, flush=True)
