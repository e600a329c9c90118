"""Starts the parts, forwards their events, and ends them in time."""

from collections.abc import Generator
import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from on_gpu import events

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds for a part to end on its own after its time is over


def environment(scratch: pathlib.Path) -> dict[str, str]:
  """Return environment variables that keep all files in the scratch folder."""
  folder = lambda name: str(scratch / name)
  # This checkout comes first. The packages of the user's path may be found too.
  paths = [str(BENCHMARKS.parent), str(BENCHMARKS)]
  user_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  # The parts run in another folder.
  user_paths = [os.path.abspath(path) for path in user_paths if path]
  paths += [path for path in user_paths if path not in paths]
  return os.environ | {
    "PYTHONPATH": os.pathsep.join(paths),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "TMPDIR": str(scratch),
    "XDG_CACHE_HOME": folder("cache"),
    "MPLCONFIGDIR": folder("matplotlib"),
    "CUDA_CACHE_PATH": folder("cuda"),
    "TORCH_HOME": folder("torch"),
    "TORCHINDUCTOR_CACHE_DIR": folder("inductor"),
    "TRITON_HOME": folder("triton"),
    "TRITON_CACHE_DIR": folder("triton_cache"),
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Each part has the device for itself, and returns it when it ends.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get(
      "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9"
    ),
  }


def run(
  request: dict[str, Any],
  scratch: pathlib.Path,
  log: pathlib.Path,
  row_seconds: float = math.inf,
) -> Generator[dict[str, Any], None, None]:
  """Runs a part.

  A row that takes too long, or crashes, ends the process of the part. The rows
  after it are measured in another process.

  Args:
    request: the part, the size, the end time, and the libraries to leave out.
    scratch: a folder for all files of the libraries.
    log: a file to which the output of the part is appended.
    row_seconds: how long a row may take.

  Yields:
    Events. The last event reports if the part was ended or crashed.
  """
  request = request | {"finished": {}}
  while (yield from _run_process(request, scratch, log, row_seconds)):
    pass


def _run_process(request, scratch, log, row_seconds):
  """Run a process of a part, and return whether another one continues it."""
  process, pipe = _start(request, scratch, log)
  watch = _Watch(process, request["until"] + GRACE, row_seconds)
  try:
    for event in _read(pipe, watch):
      _record_rows(event, request)
      yield event
  finally:
    watch.cancel()
    _kill(process)
    pipe.close()
  if watch.ended:
    return False
  for event in _report_end(request["part"], watch):
    _record_rows(event, request)
    yield event
  if watch.overtime == "part" or not (watch.overtime or watch.begun):
    return False
  if time.time() > request["until"]:
    yield _line(f"{request['part']} ended, since its time was over.")
    return False
  return True


class _Watch:
  """Kills a process if its time, or the time of a row, is over.

  Attributes:
    begun: the event of the row that is being measured, or None.
    ended: whether the process said that it ends.
    overtime: the time that was over, "part" or "row", or None.
    late: the event of the row that was being measured then, or None.
    row_seconds: how long a row may take.
  """

  def __init__(self, process, until, row_seconds):
    self.begun = self.overtime = self.late = None
    self.ended = False
    self.row_seconds = row_seconds
    self._process = process
    self._timers = {"part": self._start("part", until - time.time())}

  def begin_row(self, event):
    self.finish_row()
    self.begun = event
    if self.row_seconds < math.inf:
      self._timers["row"] = self._start("row", self.row_seconds)

  def finish_row(self):
    self.begun = None
    if "row" in self._timers:
      self._timers.pop("row").cancel()

  def cancel(self):
    for timer in self._timers.values():
      timer.cancel()

  def _start(self, name, seconds):
    timer = threading.Timer(seconds, self._end, [name])
    timer.start()
    return timer

  def _end(self, name):
    if self.overtime is None:
      self.overtime, self.late = name, self.begun
    _kill(self._process)


def _read(pipe, watch):
  """Yield the events for the command, until the process ends."""
  for line in pipe:
    if not line.endswith("\n"):  # It was ended while it wrote.
      return
    event = json.loads(line)
    if event["kind"] == "end":
      watch.ended = True
      return  # Its own processes may continue, such as compiler workers.
    if event["kind"] == "begin":
      watch.begin_row(event)
      continue
    if event["kind"] == "table":
      watch.finish_row()
    yield event


def _record_rows(event, request):
  """Keep the rows of a table for the next process of the part."""
  if event["kind"] == "table":
    request["finished"][event["title"]] = event["rows"]


def _report_end(part, watch):
  """Yield the row that ended a process, and a line about the part."""
  # Otherwise the row had been measured, and the next one had begun.
  if watch.begun and (watch.overtime is None or watch.begun is watch.late):
    reason = {
      "row": f"more than {watch.row_seconds:g} s",
      "part": "the time of its part was over",
      None: "its process broke off, and log.txt may say why",
    }[watch.overtime]
    *rows, row = watch.begun["rows"]
    rows.append(row | {"error": f"not measured: {reason}"})
    yield watch.begun | {"kind": "table", "rows": rows}
  if watch.overtime == "part":
    yield _line(f"{part} was ended, since its time was over.")
  elif watch.overtime is None and not watch.begun:
    yield _line(f"{part} broke off: log.txt may say why.")


def _start(request, scratch, log):
  """Start a part, and return its process and the file of its events."""
  reads, writes = os.pipe()
  with log.open("a") as printed:
    process = subprocess.Popen(
      [sys.executable, "-m", "on_gpu.part", json.dumps(request)],
      env=environment(scratch) | {events.PIPE: str(writes)},
      cwd=scratch,
      pass_fds=[writes],
      stdin=subprocess.DEVNULL,
      stdout=printed,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # To end its own processes, too.
    )
  os.close(writes)
  return process, os.fdopen(reads)


def _kill(process):
  """Ends a process and those that it started, if any are left."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def _line(text):
  return {"kind": "line", "text": text}
