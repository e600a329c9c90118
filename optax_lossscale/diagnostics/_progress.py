"""A line on the standard error stream, for what takes longer than a second."""

from collections.abc import Iterator
import contextlib
import sys
import threading
import time

_SILENT_SECONDS = 1.0
# A line that is written more often is not read more often.
_SECONDS_BETWEEN = 0.1


class Progress:
  """A line that is written again and again, and erased at the end.

  A thread writes it, too: while XLA compiles, nothing else could.

  Args:
    caller: the public function, which the line begins with.
    shown: whether to write anything.
  """

  def __init__(self, caller: str, shown: bool) -> None:
    self._caller = caller
    self._shown = shown
    self._begin = time.monotonic()
    self._next = self._begin + _SILENT_SECONDS
    self._text = "tracing the function"
    self._width = 0
    self._lock = threading.Lock()
    self._ended = threading.Event()

  def step(self, text: str) -> None:
    """Tell what is done now."""
    self._text = text
    if self._shown and time.monotonic() >= self._next:
      self._write()

  def _write(self) -> None:
    with self._lock:
      now = time.monotonic()
      self._next = now + _SECONDS_BETWEEN
      seconds = now - self._begin
      line = f"{self._caller}: {self._text}, {seconds:.0f} s"
      self._width = max(self._width, len(line))
      _print(line.ljust(self._width))

  def _tick(self) -> None:
    seconds = _SILENT_SECONDS
    while not self._ended.wait(seconds):
      self._write()
      seconds = 1.0

  @contextlib.contextmanager
  def running(self) -> Iterator["Progress"]:
    """Writes the line each second while the caller runs."""
    if not self._shown:
      yield self
      return
    thread = threading.Thread(target=self._tick, daemon=True)
    thread.start()
    try:
      yield self
    finally:
      self._ended.set()
      thread.join()
      if self._width:
        _print(" " * self._width + "\r")


def _print(text: str) -> None:
  print(f"\r{text}", end="", file=sys.stderr, flush=True)
