"""Runs one part in its own process, which `processes` starts.

A part gets a share of the time that is left when it begins, so parts that end
early leave their time to the parts after them.
"""

import importlib
import json
import os
import sys
from typing import NamedTuple

from shared import clock

from on_gpu import devices, events, sizes


class Part(NamedTuple):
  """The measurements of one process."""

  module: str  # in this folder, whose `run` measures
  what: str  # the first argument of `run`
  weight: float  # share of the time, relative to later parts

  @property
  def library(self) -> str:
    """The library that it measures: "jax" or "torch"."""
    return self.module.partition("_")[0]


# The most important ones are first.
PARTS = {
  "optimizers": Part("jax_optimizers", "large", 22),
  "transformer": Part("jax_training", "transformer, unrolled", 26),
  "torch-optimizers": Part("torch_optimizers", "all", 6),
  "torch-transformer": Part("torch_training", "transformer", 16),
  "resnet": Part("jax_training", "residual network", 20),
  "reports": Part("jax_reports", "all", 20),
  "many-leaves": Part("jax_optimizers", "small", 12),
}


def main() -> None:
  """Run the part that the command line describes in JSON."""
  events.reserve_output()
  request = json.loads(sys.argv[1])
  row: dict[str, str] = {}
  with clock.catch(row):
    _run(**request)
  if row:
    events.line(f"{request['part']} ended: {row['error']}")
  events.tell("end")


def _run(part, size, until, without, finished):
  part = PARTS[part]
  if size == "tiny":  # Optimizing tiny programs takes longer than it saves.
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {level}"
  if devices.is_ready(part.library, size):
    run = importlib.import_module(f"on_gpu.{part.module}").run
    run(part.what, sizes.SIZES[size], until, without, finished)


if __name__ == "__main__":
  main()
