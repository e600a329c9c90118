"""Which loss scale multiplies each gradient that ``update`` receives?

The step runs with inf as one loss scale after the other: a gradient that stays
finite was not multiplied by this scale. It also runs with the gradients that
``value_and_grad`` returns times a small number: if ``update`` receives zeros
then, they were cast to half precision.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, NamedTuple

import numpy as np

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
_TWO_STATES = _reports.Problem(
  "update{update} received gradients{names} that one loss-scale state scaled"
  " and another one unscaled: they change if one of the two scales changes.",
  "Pass the same opt_state to ols.scale_loss and ols.unscale_grads, or"
  " differentiate with ols.value_and_grad(loss_fn, opt_state).",
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
  traced = runs.traced
  has_grads = bool(traced.grad_outputs)
  if not has_grads or not _step_runs.has_finite_grads(traced, runs.outs):
    return ScaledGrads({}, [], False)
  grads = {
    i: output
    for i, output in enumerate(traced.outputs)
    if output.kind == "grads"
    and output.group in runs.updates
    and (runs.updates[output.group].applied == 1).any()
    and _host_values.is_any_nonzero([runs.outs[i]])
  }
  scales = _find_scales(runs, grads)
  ratios = {
    i: 0.5 if output.tag_kind == "scaled_grads" else 1.0
    for i, output in grads.items()
    if scales.by_grad[i]
  }
  mistakes = list(dict.fromkeys(_find_mistakes(runs, grads, scales)))
  unknown = grads.keys() - ratios.keys()
  is_known = all(
    _is_fixed(traced, grads[i].group)
    and (runs.updates[grads[i].group].update_scale == 1).all()
    for i in unknown
  )
  return ScaledGrads(ratios, mistakes, is_known)


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
  traced = runs.traced
  scales = _Scales({i: set() for i in grads}, {k: set() for k in runs.updates})
  for index in traced.scale_indices:
    outs = (
      runs.overflow_outs
      if len(traced.scale_indices) == 1
      else runs.run_with_overflow([index])
    )
    if outs is None:  # The step raises an error if a gradient overflows.
      for grad_scales in scales.by_grad.values():
        grad_scales.add(index)
      continue
    overflowing = set(_list_overflowing(traced, grads, outs))
    for k, update in traced.read_updates(outs).items():
      if np.array_equal(update.update_scale, runs.updates[k].update_scale):
        continue
      scales.by_update[k].add(index)
      # An earlier update of this step may have decreased the scale.
      if not np.isinf(update.update_scale).any():
        overflowing |= {i for i, x in grads.items() if x.group == k}
    for i in overflowing:
      scales.by_grad[i].add(index)
  return scales


def _list_overflowing(
  traced: _tracing.TracedFunction,
  grads: dict[int, _outputs.Output],
  outs: Sequence[Any],
) -> Iterator[int]:
  """Yield the gradients that overflow in a run, even if it is hidden."""
  nonfinite = {*_host_values.list_nonfinite(outs)}
  received = {grads[i].group for i in nonfinite & grads.keys()}
  is_hidden = any(traced.outputs[i].kind == "unscaled" for i in nonfinite)
  for i, output in grads.items():
    if i in nonfinite or (is_hidden and output.group not in received):
      yield i


def _find_mistakes(
  runs: _step_runs.StepRuns,
  grads: dict[int, _outputs.Output],
  scales: _Scales,
) -> Iterator[_reports.Problem]:
  """Yield the mistakes of all updates."""
  replaced_outs = _replace_unscaled(runs)

  @functools.cache
  def halve_scale(index: int) -> dict[int, Any]:
    outs = runs.run(runs.traced.scale_inputs(0.5, [index]))
    return {i: outs[i] for i in grads}

  reasons = {
    i: _judge_grad(
      runs, scales, i, replaced_outs and replaced_outs[i], halve_scale
    )
    for i in grads
  }
  for mistake in (
    _CAST_TO_HALF, _NOT_SCALED, _CONSTANT_SCALE, _OTHER_STATE, _TWO_STATES
  ):  # fmt: skip
    for k in sorted({output.group for output in grads.values()}):
      names = {i: x.name for i, x in grads.items() if x.group == k}
      affected = [name for i, name in names.items() if reasons[i] == mistake]
      if affected:
        yield _reports.fill_in_names(
          mistake,
          affected,
          [*names.values()],
          update=_scaling_mistakes.format_update(runs.traced, k),
        )


def _judge_grad(
  runs: _step_runs.StepRuns,
  scales: _Scales,
  i: int,
  replaced: Any,
  halve_scale: Callable[[int], dict[int, Any]],
) -> _reports.Problem | None:
  """Return the mistake of a gradient, without names; None if it is sound.

  Args:
    runs: the runs of the step.
    scales: its loss scales.
    i: the index of the gradient among the outputs.
    replaced: its value if unscaled gradients are small.
    halve_scale: returns the gradients if this loss scale is halved.
  """
  traced, output = runs.traced, runs.traced.outputs[i]
  is_after_unscaling = replaced is not None and _host_values.is_any_different(
    [(replaced, runs.outs[i])]
  )
  if is_after_unscaling and not _host_values.is_any_nonzero([replaced]):
    return _CAST_TO_HALF
  # The user may multiply the loss by a fixed scale as a constant.
  if _is_fixed(traced, output.group):
    return None
  grad_scales, own_scales = scales.by_grad[i], scales.by_update[output.group]
  if grad_scales and own_scales:
    if not grad_scales & own_scales:
      return _OTHER_STATE
    others = {*traced.scale_indices} - own_scales
    is_changed = lambda k: any(
      _scaling_mistakes.is_close(
        _scaling_mistakes.measure_ratio(runs.outs[i], halve_scale(k)[i]), factor
      )
      for factor in (0.5, 2.0)
    )
    return _TWO_STATES if any(map(is_changed, others)) else None
  # The difference of parameters, as an outer optimizer receives it, has none.
  if grad_scales or output.new_updates:
    return None
  if is_after_unscaling:
    return _CONSTANT_SCALE if own_scales else None
  # A state that is no argument may scale it.
  has_scale = any(tag.kind == "scale" for tag in traced.tags.values())
  is_unscaled = bool(traced.scale_indices) or not has_scale
  return _NOT_SCALED if output.has_half_backward and is_unscaled else None


def _replace_unscaled(runs: _step_runs.StepRuns) -> Sequence[Any] | None:
  """Run the step with small unscaled gradients, if there are any."""
  groups = {tag for tag in runs.traced.tags.values() if tag.kind == "unscaled"}
  return runs.run_replaced(dict.fromkeys(groups, _SMALL)) if groups else None


def _is_fixed(traced: _tracing.TracedFunction, group: int) -> bool:
  """Return whether the policy of an update never changes its loss scale."""
  return any(
    output.tag_kind == "fixed_update_scale" and output.group == group
    for output in traced.outputs
  )
