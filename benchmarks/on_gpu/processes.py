"""Starts the parts, forwards their events, and ends them in time."""

from collections.abc import Generator
import contextlib
import json
import math
import os
import pathlib
import select
import signal
import subprocess
import sys
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
  until = {"part": request["until"] + GRACE, "row": math.inf}
  begun = overtime = None  # the event of the row that is being measured
  try:
    lines = _Lines(pipe)
    while line := lines.read(min(until.values())):
      event = json.loads(line)
      if event["kind"] == "end":
        return (
          False  # Its own processes may continue, such as compiler workers.
        )
      if event["kind"] == "begin":
        begun, until["row"] = event, time.time() + row_seconds
        continue
      if event["kind"] == "table":
        begun, until["row"] = None, math.inf
        request["finished"][event["title"]] = event["rows"]
      yield event
    if line is None:
      overtime = min(until, key=until.get)
  finally:
    _kill(process)
    os.close(pipe)
  part = request["part"]
  if begun:
    event = _add_error(begun, overtime, row_seconds)
    request["finished"][event["title"]] = event["rows"]
    yield event
  if overtime == "part":
    yield _line(f"{part} was ended, since its time was over.")
  elif not begun:
    yield _line(f"{part} broke off: log.txt may say why.")
  elif time.time() > request["until"]:
    yield _line(f"{part} ended, since its time was over.")
  else:
    return True
  return False


def _add_error(begun, overtime, row_seconds):
  """Return the table with the row that ended a process."""
  reason = {
    "row": f"more than {row_seconds:g} s",
    "part": "the time of its part was over",
    None: "its process broke off, and log.txt may say why",
  }[overtime]
  *rows, row = begun["rows"]
  rows.append(row | {"error": f"not measured: {reason}"})
  return begun | {"kind": "table", "rows": rows}


class _Lines:
  """The lines of a pipe."""

  def __init__(self, pipe: int):
    self._pipe, self._rest = pipe, b""

  def read(self, until: float) -> bytes | None:
    """Return a line, b"" at the end of the pipe, or None at a time."""
    while b"\n" not in self._rest:
      seconds = max(0.0, until - time.time())
      if not select.select([self._pipe], [], [], seconds)[0]:
        return None
      read = os.read(self._pipe, 2**16)
      if not read:
        return b""
      self._rest += read
    line, self._rest = self._rest.split(b"\n", 1)
    return line


def _start(request, scratch, log):
  """Start a part, and return its process and the pipe of its events."""
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
  return process, reads


def _kill(process):
  """Ends a process and those that it started, if any are left."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def _line(text):
  return {"kind": "line", "text": text}
