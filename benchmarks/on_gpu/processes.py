"""Starts the parts, passes on what they tell, and ends them in time."""

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
GRACE = 5.0  # seconds for a part to notice by itself that its time is over


def environment(scratch: pathlib.Path) -> dict[str, str]:
  """Variables by which nothing is written elsewhere than in a folder."""
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
  asked: dict[str, Any], scratch: pathlib.Path
) -> Generator[dict[str, Any] | str, None, None]:
  """Runs a part.

  Args:
    asked: the part, the size, until when, and what to do without.
    scratch: a folder for all that the libraries write.

  Yields:
    Events, and other lines that it printed. The last event is a line if it was
    ended, or failed.
  """
  overtime, ended = threading.Event(), False
  with _start(asked, scratch) as process:

    def end():
      overtime.set()
      _kill(process)

    timer = threading.Timer(asked["until"] + GRACE - time.time(), end)
    timer.start()
    try:
      for line in process.stdout or ():
        event = events.parse(line) or line
        ended = isinstance(event, dict) and event["kind"] == "end"
        if ended:  # What it started may go on, as workers that compile do.
          break
        yield event
    finally:
      timer.cancel()
      _kill(process)
  if overtime.is_set():
    yield _line(f"{asked['part']} was ended, since its time was over.")
  elif not ended:
    yield _line(f"{asked['part']} broke off: log.txt may say why.")


def _start(asked, scratch):
  return subprocess.Popen(
    [sys.executable, "-m", "on_gpu.part", json.dumps(asked)],
    env=environment(scratch),
    cwd=scratch,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    stdin=subprocess.DEVNULL,
    text=True,
    errors="replace",
    start_new_session=True,  # To end its own processes, too.
  )


def _kill(process):
  """Ends a process and those that it started, if any are left."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def _line(text):
  return {"kind": "line", "text": text}
