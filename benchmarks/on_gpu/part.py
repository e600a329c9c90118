"""Runs one part of the plan in its own process; `processes` starts it."""

import importlib
import json
import os
import sys

from shared import clock

from on_gpu import events, plan, sizes


def main() -> None:
  """Runs the part that the command line describes in JSON."""
  request = json.loads(sys.argv[1])
  row: dict[str, str] = {}
  with clock.catch(row):
    _run(**request)
  if row:
    events.line(f"{request['part']} ended: {row['error']}")
  events.tell("end")


def _run(part, size, until, without, finished):
  module, what, _ = plan.PARTS[part]
  library = plan.PARTS[part].library
  if size == "tiny":  # Optimizing tiny programs takes longer than it saves.
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {level}"
  device = importlib.import_module(f"on_gpu.{library}_device")
  if device.is_ready(size):
    run = importlib.import_module(f"on_gpu.{module}").run
    run(what, sizes.SIZES[size], until, without, finished)


if __name__ == "__main__":
  main()
