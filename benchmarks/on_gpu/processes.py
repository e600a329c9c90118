"""Starts the parts, forwards their events, and ends them in time."""

from collections.abc import Generator
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

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
  row_seconds: float = 120,
) -> Generator[dict[str, Any], None, None]:
  """Run a part.

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
  begun = None  # the event of the row that is being measured
  with _Process(request, scratch, log) as process:
    process.end_after("part", request["until"] + GRACE - time.time())
    for event in process.read_events():
      if event["kind"] == "end":
        # Its own processes may continue, such as compiler workers.
        return False
      if event["kind"] == "begin":
        begun = event
        process.end_after("row", row_seconds)
        continue
      if event["kind"] == "table":
        begun = None
        process.lift("row")
        request["finished"][event["title"]] = event["rows"]
      yield event
  part = request["part"]
  if begun:
    event = _add_error(begun, process.ended_by, row_seconds)
    request["finished"][event["title"]] = event["rows"]
    yield event
  if process.ended_by == "part":
    text = f"{part} was ended, since its time was over."
  elif not begun:
    text = f"{part} broke off: log.txt may say why."
  elif time.time() > request["until"]:
    text = f"{part} ended, since its time was over."
  else:
    return True
  yield {"kind": "line", "text": text}
  return False


def _add_error(begun, ended_by, row_seconds):
  """Return the table with the row that ended a process."""
  reason = {
    "row": f"more than {row_seconds:g} s",
    "part": "the time of its part was over",
    None: "its process broke off, and log.txt may say why",
  }[ended_by]
  *rows, row = begun["rows"]
  rows.append(row | {"error": f"not measured: {reason}"})
  return begun | {"kind": "table", "rows": rows}


class _Process:
  """The process of a part, which is killed on exit, or when a limit is over.

  Attributes:
    ended_by: the name of the limit that ended it, or None.
  """

  def __init__(self, request, scratch, log):
    with log.open("a") as printed:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "on_gpu.part", json.dumps(request)],
        env=environment(scratch),
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=printed,
        text=True,
        start_new_session=True,  # To end its own processes, too.
      )
    self.ended_by: str | None = None
    self._limits: dict[str, threading.Timer] = {}

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for name in self._limits:
      self.lift(name)
    self._kill()
    self._process.stdout.close()
    self._process.wait()

  def read_events(self):
    """Yield the events of the process until it ends."""
    for line in self._process.stdout:
      if line.endswith("\n"):  # not of a process that ended in the middle
        yield json.loads(line)

  def end_after(self, name: str, seconds: float) -> None:
    """Set a limit."""
    self._limits[name] = threading.Timer(max(0, seconds), self._end, [name])
    self._limits[name].start()

  def lift(self, name: str) -> None:
    """Lift a limit, if it is set."""
    if name in self._limits:
      self._limits[name].cancel()

  def _end(self, name):
    self.ended_by = self.ended_by or name
    self._kill()

  def _kill(self):
    """End the process and those that it started, if any are left."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
