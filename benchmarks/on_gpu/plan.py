"""The parts of a run, the most important ones first.

Each part runs in its own process. It gets a share of the time that is left when
it begins, so parts that end early leave their time to the parts after them.
"""

from typing import NamedTuple


class Part(NamedTuple):
  """The measurements of one process."""

  module: str  # in this folder, whose `run` measures
  what: str  # the first argument of `run`
  weight: float  # share of the time, relative to later parts

  @property
  def library(self) -> str:
    """The library that it measures: "jax" or "torch"."""
    return self.module.partition("_")[0]


PARTS = {
  "optimizers": Part("jax_optimizers", "large", 22),
  "transformer": Part("jax_training", "transformer, unrolled", 26),
  "torch-optimizers": Part("torch_optimizers", "all", 6),
  "torch-transformer": Part("torch_training", "transformer", 16),
  "resnet": Part("jax_training", "residual network", 20),
  "reports": Part("jax_reports", "all", 20),
  "many-leaves": Part("jax_optimizers", "small", 12),
}
