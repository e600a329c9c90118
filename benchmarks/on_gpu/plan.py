"""The parts of a run, the most important ones first.

Each part runs in its own process. It gets a share of the time that is left when
it begins, so parts that end early leave their time to the parts after them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Part(NamedTuple):
  """The measurements of one process.

  Attributes:
    library: "jax" or "torch".
    weight: its share of the time, relative to the parts after it.
    run: measures, from the size, the end time, the libraries to leave out, and
      the rows that an earlier process of this part finished.
  """

  library: str
  weight: float
  run: Callable[[Any, float, list[str], dict[str, Any]], None]


def _jax_optimizers(cases):
  def run(size, until, without, finished):
    from on_gpu import jax_optimizers

    chosen = getattr(jax_optimizers, cases)
    jax_optimizers.run(chosen, size, until, without, finished)

  return run


def _jax_training(model):
  def run(size, until, without, finished):
    from on_gpu import jax_training

    jax_training.run(model, size, until, finished)

  return run


def _jax_reports(size, until, without, finished):
  from on_gpu import jax_reports

  jax_reports.run(size, until, finished)


def _torch_optimizers(size, until, without, finished):
  from on_gpu import torch_optimizers

  torch_optimizers.run(size, until, finished)


def _torch_training(model):
  def run(size, until, without, finished):
    from on_gpu import torch_training

    torch_training.run(model, size, until, finished)

  return run


PARTS = {
  "optimizers": Part("jax", 22, _jax_optimizers("LARGE")),
  "transformer": Part("jax", 26, _jax_training("transformer, unrolled")),
  "torch-optimizers": Part("torch", 6, _torch_optimizers),
  "torch-transformer": Part("torch", 16, _torch_training("transformer")),
  "transformer-in-scan": Part("jax", 14, _jax_training("transformer, scan")),
  "resnet": Part("jax", 20, _jax_training("residual network")),
  "reports": Part("jax", 20, _jax_reports),
  "many-leaves": Part("jax", 12, _jax_optimizers("SMALL")),
  "torch-resnet": Part("torch", 8, _torch_training("residual network")),
}
