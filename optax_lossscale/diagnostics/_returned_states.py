"""Check by values that a step returns the loss-scale state of ``update``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _applied_updates,
  _host_values,
  _outputs,
  _reports,
  _step_runs,
  _tracing,
)

_NOT_RETURNED = _reports.Problem(
  "The step does not return the opt_state that update returns{details}. So the"
  " loss scale does not follow the gradients, and after an overflow every step"
  " may be skipped.",
  "Return it unchanged: updates, opt_state = tx.update(grads, opt_state,"
  " params). with_loss_scaling keeps the old optimizer state of a skipped step."
  " Select only other state, such as batch statistics, with"
  " ols.select_if_applied. Bounds are arguments of the policy:"
  " ols.DynamicLossScale(min_scale=..., max_scale=...).",
)
MULTI_STEPS = _reports.Problem(
  "optax.MultiSteps is around with_loss_scaling. It hides an overflow of the"
  " first micro-batches from update, and keeps the old loss-scale state.",
  "Put it inside: ols.with_loss_scaling(optax.MultiSteps(inner, n)).",
)
_UNUSED_STATE = _reports.Problem(
  "update does not use the loss-scale state among the arguments of the step, so"
  " the loss scale never changes.",
  "Call tx.init once, before training, and pass its state to ols.value_and_grad"
  " and update.",
)
_NO_UPDATE_AFTER_OVERFLOW = _reports.Problem(
  "update does not run if the gradients overflow, since a branch tests whether"
  " they are finite. So the loss scale never decreases: after the first"
  " overflow, every step is skipped.",
  "Call update outside of the branch, since with_loss_scaling skips bad steps.",
)

# The factor on the loss scale with which gradients that do not overflow still
# don't.
_LOWER = 2.0**-8

# No result is an optimizer state.
NO_STATE = _reports.fill_in_names(_NOT_RETURNED, details="")


def check_dependence(
  runs: _step_runs.StepRuns, ran_indices: Sequence[int]
) -> list[_reports.Problem]:
  """Check that the results may depend on the state that each `update` returns.

  Args:
    runs: the runs of the step.
    ran_indices: the updates that ran.
  """
  traced = runs.traced
  states = [x for x in traced.outputs if x.kind == "state_scale"]
  # A state may be returned as a list of leaves, which nothing identifies.
  results = [x for x in traced.outputs if x.kind in _outputs.RETURNED_KINDS]
  returned = frozenset().union(*(x.new_scales for x in states or results))
  missing = {*ran_indices} - returned - _list_inner_updates(traced)
  if missing and not _counts_skips(runs):
    return [NO_STATE]
  if _has_old_inner_state(traced):
    details = ": its inner_state is the old one"
    return [_reports.fill_in_names(_NOT_RETURNED, details=details)]
  return []


def _counts_skips(runs: _step_runs.StepRuns) -> bool:
  """Return whether an overflow changes each count of skipped steps.

  Values are not followed through a Ref, but they are in it.
  """
  if runs.skipped is None:
    return False
  counts = [
    (x.skip_count, y.skip_count)
    for x, y in zip(runs.base.states, runs.skipped.states, strict=True)
  ]
  return bool(counts) and not any(np.array_equal(x, y) for x, y in counts)


def _list_inner_updates(traced: _tracing.TracedFunction) -> set[int]:
  """Return the updates on whose results the gradients of others depend.

  The state of such a virtual or inner update may be dropped on purpose.
  """
  return {i for x in traced.grad_outputs for i in x.new_updates - {x.group}}


def _has_old_inner_state(traced: _tracing.TracedFunction) -> bool:
  """Return whether all arrays of an inner state are those of the arguments."""
  regions, outvars = traced.regions, traced.closed_jaxpr.jaxpr.outvars
  rows = [
    (output, i)
    for i, output in enumerate(traced.outputs)
    if output.kind in _outputs.RETURNED_KINDS
    and "inner_state" in _outputs.split_name(output.name)
    and "hyperparams" not in _outputs.split_name(output.name)
  ]
  arrays = [i for _, i in rows if _eqns.get_shape(outvars[i])]
  return (
    bool(arrays)
    and all(map(regions.is_argument_output, arrays))
    and not any(output.depends_on_gradients for output, _ in rows)
  )


def check_after_overflow(
  runs: _step_runs.StepRuns, skipped: _step_runs.Run
) -> Iterator[_reports.Problem | str]:
  """Check that the count of skipped steps that an `update` returned comes back.

  Args:
    runs: the runs of the step.
    skipped: its run with an overflow.

  Yields:
    Mistakes, and sentences on what could not be checked.
  """
  traced = runs.traced
  scale_names = [traced.input_names[i] for i in traced.scale_indices]
  # The states of the wrapper are inside of the one of `MultiSteps`.
  if any("inner_opt_state" in _outputs.split_name(x) for x in scale_names):
    yield MULTI_STEPS
    return
  updates, base_updates = skipped.updates, runs.base.updates
  if any(x.has_run and not updates[i].has_run for i, x in base_updates.items()):
    yield _NO_UPDATE_AFTER_OVERFLOW
  masks = _match_states(
    skipped.states,
    {i: x for i, x in updates.items() if x.has_skipped},
    "skip_count",
    np.equal,
  )
  # If a condition keeps the old parameters, it may keep the old state, too.
  kept_masks = [
    ~mask & ~_find_moved(runs.base, skipped, state) for state, mask in masks
  ]
  lost = _find_lost_state(
    [
      (state, mask | kept_mask)
      for (state, mask), kept_mask in zip(masks, kept_masks, strict=True)
    ]
  )
  if lost is not None:
    counts = [np.max(updates[i].new_skip_count) for i in lost.calls]
    yield _reports.fill_in_names(
      _NOT_RETURNED,
      details=": after an overflow, it counts"
      f" {np.max(lost.skip_count)} skipped steps in place of {max(counts)}",
    )
  elif any(kept_mask.any() for kept_mask in kept_masks):
    yield _applied_updates.KEPT_BACK


def check_with_lower_scale(
  runs: _step_runs.StepRuns,
) -> list[_reports.Problem]:
  """Check that `update` uses the loss scale of the arguments, and returns it.

  Only the loss scale of the last member of an ensemble is lower.
  """
  traced = runs.traced
  inputs = list(traced.inputs)
  for i in traced.scale_indices:
    factor = np.ones(inputs[i].shape, inputs[i].dtype)
    factor.reshape(-1)[-1] = _LOWER
    inputs[i] = inputs[i] * factor
  run = runs.run(inputs)
  updates = {i: x for i, x in run.updates.items() if x.has_run}
  if any(
    np.array_equal(x.update_scale, runs.base.updates[i].update_scale)
    for i, x in updates.items()
    if i not in _list_inner_updates(traced)
  ):
    return [_UNUSED_STATE]
  masks = _match_states(run.states, updates, "scale", np.less_equal)
  lost = _find_lost_state(masks)
  if lost is None:
    return []
  scales = [np.min(updates[i].new_scale) for i in lost.calls]
  return [
    _reports.fill_in_names(
      _NOT_RETURNED,
      details=": with a lower loss scale, its scale is"
      f" {np.max(lost.scale):g} in place of {min(scales):g}",
    )
  ]


def _match_states(
  states: Sequence[_step_runs.StateRecord],
  updates: dict[int, _step_runs.UpdateRecord],
  field: str,
  compare: Callable[..., Any],
) -> list[tuple[_step_runs.StateRecord, np.ndarray]]:
  """Compare states with those that their updates returned.

  Args:
    states: the states.
    updates: the updates. A state of others is left out.
    field: the field to compare.
    compare: returns whether numbers of a state are those of an update.

  Returns:
    For each state, a flag for each member of an ensemble.
  """
  return [
    (
      state,
      np.any(
        [
          _match(
            getattr(state, field), getattr(updates[i], f"new_{field}"), compare
          )
          for i in state.calls
        ],
        axis=0,
      ),
    )
    for state in states
    if state.calls and state.calls <= updates.keys()
  ]


def _match(
  x: np.ndarray, new: np.ndarray, compare: Callable[..., Any]
) -> np.ndarray:
  """Return which members of an ensemble have a value that an update returned.

  Args:
    x: the values of a state that the step returned.
    new: those that `update` returned. Those of a loop are stacked.
    compare: see :func:`_match_states`.
  """
  size = max(new.ndim - x.ndim, 0)
  is_of_members = new.shape[size:] == x.shape
  shape = x.shape if is_of_members else (1,) * x.ndim
  mask: np.ndarray = compare(x, new.reshape((-1, *shape))).any(axis=0)
  return mask


def _find_lost_state(
  masks: Sequence[tuple[_step_runs.StateRecord, np.ndarray]],
) -> _step_runs.StateRecord | None:
  """Return a state of an `update` of which no state comes back.

  A step may return several states of an `update`, such as that of the best
  step.
  """
  returned = {i for state, mask in masks if mask.all() for i in state.calls}
  lost = (state for state, _ in masks if not state.calls <= returned)
  return next(lost, None)


def _find_moved(
  run: _step_runs.Run, skipped: _step_runs.Run, state: _step_runs.StateRecord
) -> np.ndarray:
  """Return whether an overflow changes results of the updates of a state.

  If none of them was applied, an overflow has nothing to change.

  Args:
    run: the run of the step.
    skipped: its run with an overflow.
    state: the state.

  Returns:
    A flag for each member of the ensemble.
  """
  shape = state.scale.shape
  applied = {i for i in state.calls if (run.updates[i].applied == 1).any()}
  rows = [
    _host_values.find_different_rows(x, y, len(shape))
    for output, x, y in zip(
      run.traced.outputs, run.outs, skipped.outs, strict=True
    )
    if applied
    and output.is_state
    and state.calls & output.new_updates
    and x.shape[: len(shape)] == shape
  ]
  return np.any(_host_values.to_host(rows) or [np.ones(shape, bool)], axis=0)
