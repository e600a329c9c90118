"""Whole training steps on GPUs with 16 GB, by their compiler, and bounds."""

from collections.abc import Callable
from typing import Any

import bounds
import compiled_bytes  # Before others import jax.
import gpus
import trained_models

from optax_lossscale import diagnostics

BATCH = 64


def training(device: str, model: str, variant: str) -> dict[str, Any]:
  """The figures of a step with ``BATCH`` images, and the largest batch.

  Args:
    device: a name in ``gpus.GPUS``.
    model: a name in ``trained_models.MODELS``.
    variant: a name in ``trained_models.VARIANTS``.

  Returns:
    The fields of ``compiled_bytes.Figures``, with ``flops`` of the matmuls by
    dtype, ``seconds`` of ``bounds.least_seconds``, ``largest_batch`` (None by
    hand), and ``batches``, the batches that were compiled to find it.
  """

  def figures(batch: int) -> compiled_bytes.Figures:
    step, carry, data = trained_models.make_training_step(model, variant, batch)
    return compiled_bytes.figures(
      step, carry, data, device=device, donate_argnums=0
    )

  step = trained_models.make_training_step(model, variant, BATCH)
  flops = count_flops_by_dtype(*step)
  known = {BATCH: figures(BATCH)}

  def memory_needed(batch: int) -> int:
    if batch not in known:
      known[batch] = figures(batch)
    return known[batch].needed

  # The model by hand is only for comparison, and its search would take minutes.
  searched = variant != "by hand"
  largest = bounds.largest_batch(memory_needed) if searched else None
  return known[BATCH]._asdict() | {
    "flops": flops,
    "seconds": bounds.least_seconds(
      gpus.GPUS[device], known[BATCH].bytes, flops
    ),
    "batches": {
      batch: {"bytes": results.bytes, "needed": results.needed}
      for batch, results in sorted(known.items())
    },
    "largest_batch": largest,
  }


def count_flops_by_dtype(
  step: Callable[..., Any], *args: Any
) -> dict[str, int]:
  """Return the FLOPs of matmuls by operand dtype, before compilation."""
  names = {"float32": "f32", "float16": "f16"}
  report = diagnostics.precision_report(step, *args)
  result: dict[str, int] = {}
  for row in report.flops:
    name = names[row.operand_dtype]
    result[name] = result.get(name, 0) + row.flops
  return result
