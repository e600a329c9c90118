"""Which loss scale multiplies each gradient that ``update`` receives?

The step runs with inf as one loss scale after the other: a gradient that stays
finite was not multiplied by this scale. It also runs with the gradients that
``value_and_grad`` returns times a small number: if ``update`` receives zeros
then, they were cast to half precision.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _reports,
  _scaling_mistakes,
  _step_runs,
  _tracing,
)

_NOT_SCALED = _reports.Problem(
  "update{update} received gradients of an unscaled loss{names}, so small"
  " float16 gradients underflow.",
  "Differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
_OTHER_STATE = _reports.Problem(
  "update{update} received gradients{names} that the state of another optimizer"
  " scaled, so its own loss scale does not act and falls with each overflow of"
  " the other.",
  "Pass the state of the same optimizer to ols.value_and_grad(loss_fn,"
  " opt_state).",
)
_CONSTANT_SCALE = _reports.Problem(
  "update{update} received gradients{names} that a constant loss scale scaled,"
  " so the loss scale of the optimizer does not act and falls with each"
  " overflow.",
  "Pass the current opt_state to ols.value_and_grad(loss_fn, opt_state), inside"
  " of the step.",
)
_CAST_TO_HALF = _reports.Problem(
  "update{update} received gradients{names} that were cast to half precision"
  " after they were unscaled, so small ones are zero.",
  "Keep true gradients in float32, and add up micro-batches in float32.",
)
# With this factor, gradients are zero in float16, and normal in float32, even
# if they are unscaled three times.
_SMALL = 2.0**-40


class ScaledGrads(NamedTuple):
  """The loss scales of the gradients of a step.

  Attributes:
    ratios: for each gradient that a loss scale among the arguments multiplies,
      by the index of its output, the factor by which a sound gradient changes
      if the loss scale halves.
    mistakes: mistakes in how gradients are scaled.
    is_known: whether these are all gradients that are not zero, apart from
      those with a fixed loss scale of 1.
  """

  ratios: dict[int, float]
  mistakes: list[_reports.Problem]
  is_known: bool


def find_scaled_grads(runs: _step_runs.StepRuns) -> ScaledGrads:
  """Find out by which loss scale each gradient of a step is multiplied.

  Nothing is known of a gradient that is zero, or if any is not finite.

  Args:
    runs: the runs of the step.
  """
  traced, base = runs.traced, runs.base
  if not traced.grad_outputs or not base.has_finite_grads:
    return ScaledGrads({}, [], False)
  grads = {
    i: output
    for i, output in enumerate(traced.outputs)
    if output.kind == "grads"
    and output.group in base.updates
    and (base.updates[output.group].applied == 1).any()
    and _host_values.is_any_nonzero([base.outs[i]])
  }
  scales = _find_scales(runs, grads)
  ratios = {
    i: 0.5 if output.tag_kind == "scaled_grads" else 1.0
    for i, output in grads.items()
    if scales.by_grad[i]
  }
  is_known = all(
    i in ratios
    or (
      _is_fixed(traced, output.group)
      and (base.updates[output.group].update_scale == 1).all()
    )
    for i, output in grads.items()
  )
  return ScaledGrads(
    ratios, list(_find_mistakes(runs, grads, scales)), is_known
  )


class _Scales(NamedTuple):
  """The loss scales of a step, as indices of its inputs.

  Attributes:
    by_grad: those that multiply a gradient, by the index of its output.
    by_update: those that an `update` receives, by the number of its call.
  """

  by_grad: dict[int, set[int]]
  by_update: dict[int, set[int]]


def _find_scales(
  runs: _step_runs.StepRuns, grads: dict[int, _outputs.Output]
) -> _Scales:
  """Find out which gradients overflow with which loss scale."""
  updates = runs.base.updates
  scales = _Scales({i: set() for i in grads}, {k: set() for k in updates})
  indices = runs.traced.scale_indices
  for index in indices:
    run = (
      runs.overflow if len(indices) == 1 else runs.run_with_overflow([index])
    )
    # The step may raise an error if a gradient overflows.
    overflowing = {*grads} if run is None else _find_overflowing(run, grads)
    for k, update in run.updates.items() if run else ():
      if np.array_equal(update.update_scale, updates[k].update_scale):
        continue
      scales.by_update[k].add(index)
      # An earlier update of this step may have decreased the scale.
      if not np.isinf(update.update_scale).any():
        overflowing |= {i for i, x in grads.items() if x.group == k}
    for i in overflowing:
      scales.by_grad[i].add(index)
  return scales


def _find_overflowing(
  run: _step_runs.Run, grads: dict[int, _outputs.Output]
) -> set[int]:
  """Return the gradients that overflow in a run, even if it is hidden."""
  nonfinite = {*_host_values.list_nonfinite(run.outs)}
  received = {grads[i].group for i in nonfinite & grads.keys()}
  is_hidden = any(run.traced.outputs[i].kind == "unscaled" for i in nonfinite)
  return {
    i
    for i, output in grads.items()
    if i in nonfinite or (is_hidden and output.group not in received)
  }


def _find_mistakes(
  runs: _step_runs.StepRuns,
  grads: dict[int, _outputs.Output],
  scales: _Scales,
) -> Iterator[_reports.Problem]:
  """Yield the mistakes of all updates."""
  traced = runs.traced
  groups = {tag for tag in traced.tags.values() if tag.kind == "unscaled"}
  replaced = dict.fromkeys(groups, _SMALL)
  small = runs.run(traced.inputs, replaced) if groups else runs.base
  reasons = {i: _judge_grad(runs, scales, i, small) for i in grads}
  for mistake in _CAST_TO_HALF, _NOT_SCALED, _CONSTANT_SCALE, _OTHER_STATE:
    affected = {i for i, reason in reasons.items() if reason == mistake}
    if affected and mistake == _NOT_SCALED:
      affected &= _find_after_half_backward(traced)
    yield from _scaling_mistakes.repeat_by_update(
      traced, mistake, affected, grads
    )


def _judge_grad(
  runs: _step_runs.StepRuns,
  scales: _Scales,
  i: int,
  small: _step_runs.Run,
) -> _reports.Problem | None:
  """Return the mistake of a gradient, without names; None if it is sound.

  Args:
    runs: the runs of the step.
    scales: its loss scales.
    i: the index of the gradient among the outputs.
    small: the run in which unscaled gradients are small.
  """
  traced, output = runs.traced, runs.traced.outputs[i]
  is_after_unscaling = _host_values.is_any_different(
    [(small.outs[i], runs.base.outs[i])]
  )
  if is_after_unscaling and not _host_values.is_any_nonzero([small.outs[i]]):
    return _CAST_TO_HALF
  # The user may multiply the loss by a fixed scale as a constant.
  if _is_fixed(traced, output.group):
    return None
  grad_scales, own_scales = scales.by_grad[i], scales.by_update[output.group]
  # The difference of parameters, as an outer optimizer receives it, has none.
  if grad_scales or output.new_updates:
    is_other = bool(own_scales) and grad_scales.isdisjoint(own_scales)
    return _OTHER_STATE if grad_scales and is_other else None
  if is_after_unscaling:
    return _CONSTANT_SCALE if own_scales else None
  # A state that is no argument may scale it.
  has_scale = any(tag.kind == "scale" for tag in traced.tags.values())
  return _NOT_SCALED if traced.scale_indices or not has_scale else None


def _find_after_half_backward(traced: _tracing.TracedFunction) -> set[int]:
  """Return the outputs that depend on float16 or float8 in a backward pass."""
  is_half = lambda var: (
    _arrays.is_inexact(var.aval) and _arrays.has_narrow_range(var.aval.dtype)
  )
  return traced.regions.find_outputs(
    [
      key
      for key, visit in traced.regions.visits.items()
      if any(map(is_half, visit.eqn.outvars))
      and visit.stack_location.is_backward
    ]
  )


def _is_fixed(traced: _tracing.TracedFunction, group: int) -> bool:
  """Return whether the policy of an update never changes its loss scale."""
  return any(
    output.tag_kind == "fixed_update_scale" and output.group == group
    for output in traced.outputs
  )
