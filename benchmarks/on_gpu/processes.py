"""Runs each part in a separate process, and ends it in time."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from on_gpu.findings import Findings

BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds for a part to end on its own after its time is over


def make_environment(scratch: pathlib.Path) -> dict[str, str]:
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


def run(request: dict[str, Any], scratch: pathlib.Path) -> None:
  """Run a part, again after each row that ended its process.

  Args:
    request: the arguments of `part.run`.
    scratch: a folder for all files of the libraries.
  """
  out, part = pathlib.Path(request["out"]), request["part"]
  before = _count_rows(out)
  while not _run_process(request, scratch, out / "log.txt"):
    after = _count_rows(out)
    is_over = time.time() > request["until"]
    if is_over or after == before:
      reason = "was ended, since its time was over."
      broke = "broke off: log.txt may say why."
      Findings(out).add_line(f"{part} {reason if is_over else broke}")
      return
    before = after


def _count_rows(out):
  return sum(len(table["rows"]) for table in Findings(out).tables.values())


def _run_process(request, scratch, log):
  """Run a process of a part, and return whether it ended as it should."""
  with log.open("a") as printed:
    process = subprocess.Popen(
      [sys.executable, "-m", "on_gpu.part", json.dumps(request)],
      env=make_environment(scratch),
      cwd=scratch,
      stdin=subprocess.DEVNULL,
      stderr=printed,
      start_new_session=True,  # To end its own processes, too.
    )
  try:
    return process.wait(request["until"] + GRACE - time.time()) == 0
  except subprocess.TimeoutExpired:
    return False
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
