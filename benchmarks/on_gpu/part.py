"""Runs one part in its own process, which `processes` starts.

A part gets a share of the time that is left when it begins, so parts that end
early leave their time to the parts after them.
"""

import importlib
import json
import os
import pathlib
import sys
from typing import NamedTuple

from shared import clock

from on_gpu import devices, sizes
from on_gpu.findings import Findings


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


def run(part, size, until, without, out, row_seconds) -> None:
  """Run a part.

  Args:
    part: a name in `PARTS`.
    size: a name in `sizes.SIZES`.
    until: the time at which it should end.
    without: the libraries to leave out.
    out: the folder of the results.
    row_seconds: how long a row of a table may take.
  """
  module, what, _ = PARTS[part]
  if size == "tiny":  # Optimizing tiny programs takes longer than it saves.
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {level}"
  findings = Findings(pathlib.Path(out), row_seconds)
  findings.reserve_screen()
  row: dict[str, str] = {}
  with clock.catch(row):
    if devices.is_ready(PARTS[part].library, size, findings):
      measure = importlib.import_module(f"on_gpu.{module}").run
      measure(what, sizes.SIZES[size], until, findings, without)
  if row:
    findings.add_line(f"{part} ended: {row['error']}")


if __name__ == "__main__":
  run(**json.loads(sys.argv[1]))
