"""A progress line on the standard error stream, for slow functions."""

from collections.abc import Iterator
import contextlib
import sys
import threading
import time

_DELAY_SECONDS = 1.0
# Terminals are slow, and a reader sees no faster changes.
_MIN_INTERVAL_SECONDS = 0.1


class ProgressLine:
  """A line that is rewritten in place, and erased at the end.

  It appears after a second. A thread rewrites it, too, since the main thread
  waits while XLA compiles.

  Args:
    caller: the name of the public function, with which the line begins.
    is_enabled: whether to write anything.
  """

  def __init__(self, caller: str, is_enabled: bool) -> None:
    self._caller = caller
    self._is_enabled = is_enabled
    self._start_time = time.monotonic()
    self._next_write_time = self._start_time + _DELAY_SECONDS
    self._description = "tracing the function"
    self._line_width = 0
    self._lock = threading.Lock()
    self._stop_event = threading.Event()

  def set_description(self, description: str) -> None:
    """Set the text, and write the line unless it was just written."""
    self._description = description
    if self._is_enabled and time.monotonic() >= self._next_write_time:
      self._write_line()

  def _write_line(self) -> None:
    with self._lock:
      now = time.monotonic()
      self._next_write_time = now + _MIN_INTERVAL_SECONDS
      elapsed = now - self._start_time
      line = f"{self._caller}: {self._description}, {elapsed:.0f} s"
      self._line_width = max(self._line_width, len(line))
      _print_to_stderr(line.ljust(self._line_width))

  def _write_periodically(self) -> None:
    delay = _DELAY_SECONDS
    while not self._stop_event.wait(delay):
      self._write_line()
      delay = 1.0

  @contextlib.contextmanager
  def refresh_in_background(self) -> Iterator["ProgressLine"]:
    """Write the line each second while the context is active."""
    if not self._is_enabled:
      yield self
      return
    thread = threading.Thread(target=self._write_periodically, daemon=True)
    thread.start()
    try:
      yield self
    finally:
      self._stop_event.set()
      thread.join()
      if self._line_width:
        _print_to_stderr(" " * self._line_width + "\r")


def _print_to_stderr(text: str) -> None:
  print(f"\r{text}", end="", file=sys.stderr, flush=True)
