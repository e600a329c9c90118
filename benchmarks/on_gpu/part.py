"""Runs one part of the plan in its own process; `processes` starts it."""

import json
import os
import sys

from on_gpu import clock, events, plan, sizes


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
  chosen = plan.PARTS[part]
  if size == "tiny":  # Optimizing tiny programs takes longer than it saves.
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {level}"
  if chosen.library == "torch":
    from on_gpu import torch_device as device
  else:
    from on_gpu import jax_device as device
  if device.ready(size):
    chosen.run(sizes.SIZES[size], until, without, finished)


if __name__ == "__main__":
  main()
