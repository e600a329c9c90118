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

from on_gpu import events

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds for a part to end on its own after its time is over


def environment(scratch: pathlib.Path) -> dict[str, str]:
  """Return environment variables that keep all files in the scratch folder."""
  folder = lambda name: str(scratch / name)
  return os.environ | {
    "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), str(BENCHMARKS)]),
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
  request: dict[str, Any], scratch: pathlib.Path, log: pathlib.Path
) -> Generator[dict[str, Any], None, None]:
  """Runs a part.

  Args:
    request: the part, the size, the end time, and the libraries to leave out.
    scratch: a folder for all files of the libraries.
    log: a file to which the output of the part is appended.

  Yields:
    Events. The last event reports if the part was ended or crashed.
  """
  overtime, ended = threading.Event(), False
  process, pipe = _start(request, scratch, log)

  def end():
    overtime.set()
    _kill(process)

  timer = threading.Timer(request["until"] + GRACE - time.time(), end)
  timer.start()
  try:
    for line in pipe:
      if not line.endswith("\n"):  # It was ended while it wrote.
        break
      event = json.loads(line)
      ended = event["kind"] == "end"
      if ended:  # Its own processes may continue, such as compiler workers.
        break
      yield event
  finally:
    timer.cancel()
    _kill(process)
    pipe.close()
  if overtime.is_set():
    yield _line(f"{request['part']} was ended, since its time was over.")
  elif not ended:
    yield _line(f"{request['part']} broke off: log.txt may say why.")


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
