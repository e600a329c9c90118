"""Would a lower loss scale keep the gradients of a step finite?

An inf in the backward pass is usually the fault of the loss scale, but a
division by zero is not. The loss scale is an input of the compiled step, so the
step runs with lower scales, without another compilation.
"""

import dataclasses

import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _scale_search,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._overflow import _report


def assess_loss_scale(
  runs: _step_runs.StepRuns, origins: list[_report.Overflow]
) -> list[_report.Overflow]:
  """Add the loss scale that helps to origins, and sort them.

  If no loss scale helps, or the loss itself is not finite, the origins in the
  forward pass are first.

  Args:
    runs: the runs of the step.
    origins: the origins of their infs and NaNs.

  Returns:
    The origins. Those in the backward pass have a ``scale_factor`` if it can be
    measured.
  """
  traced, outs = runs.traced, runs.outs
  factor, has_zero_grads = None, False
  if (
    any(origin.backward for origin in origins)
    and traced.scale_indices
    and not _step_runs.has_finite_grads(traced, outs)
  ):
    factor, has_zero_grads = _find_scale_factor(runs)
  is_below_min = factor is not None and _is_below_min_scale(traced, factor)
  has_loss_scale = bool(traced.scale_indices) or any(
    output.kind in ("grads", "unscaled") for output in traced.outputs
  )
  origins = [
    dataclasses.replace(
      origin,
      has_loss_scale=has_loss_scale,
      scale_factor=factor if origin.backward else None,
      has_zero_grads=has_zero_grads and origin.backward,
      is_below_min_scale=is_below_min and origin.backward,
    )
    for origin in origins
  ]
  if factor == 0 or not _host_values.all_finite(
    traced.select_kind(outs, "loss")
  ):
    # An argument is the origin of what it reaches, whatever the direction is.
    origins.sort(key=lambda origin: origin.backward)
  return origins


def _find_scale_factor(runs: _step_runs.StepRuns) -> tuple[float, bool]:
  """Return the largest power of two that keeps the gradients finite.

  Returns:
    The factor on the loss scale, 0.0 if there is none; and whether all
    gradients are zero with it.
  """
  log2_decrease = _scale_search.find_log2_decrease(runs.has_finite_grads_at)
  if log2_decrease is None:
    return 0.0, False
  # Without an `update`, the gradients themselves are no outputs.
  outs = runs.run_with_factor(2.0**-log2_decrease)
  grads = runs.traced.select_kind(outs, "grads")
  return (
    2.0**-log2_decrease,
    bool(grads) and not _host_values.is_any_nonzero(grads),
  )


def _is_below_min_scale(traced: _tracing.TracedFunction, factor: float) -> bool:
  """Return whether the policy does not decrease the loss scale that far."""
  scales = _host_values.to_host(
    [traced.inputs[i] for i in traced.scale_indices]
  )
  new_scale = factor * min(float(np.min(scale)) for scale in scales)
  return traced.lowest_scale is not None and new_scale < traced.lowest_scale
