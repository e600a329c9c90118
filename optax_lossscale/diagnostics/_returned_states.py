"""Check by values that a step returns the loss-scale state of ``update``."""

from collections.abc import Iterator, Sequence
import math
from typing import Any

import numpy as np

from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _reports,
  _scaling_mistakes,
  _step_runs,
  _tracing,
)

_OLD_STATE = _reports.Problem(
  "The step returns an old loss-scale state instead of the one that update"
  " returns, so the loss scale never changes.",
  "Return the opt_state that update returns, unchanged:"
  " updates, opt_state = tx.update(grads, opt_state, params).",
)
NO_STATE = _reports.Problem(
  "The step does not return the opt_state that update returns, so the loss"
  " scale never changes, and the optimizer learns nothing from its steps.",
  "Return it: updates, opt_state = tx.update(grads, opt_state, params).",
)
_OLD_INNER_STATE = _reports.Problem(
  "The step returns an old state of the inner optimizer, which learns nothing"
  " from its steps.",
  "Return the opt_state that update returns, unchanged:"
  " updates, opt_state = tx.update(grads, opt_state, params).",
)
_STATE_PUT_BACK = _reports.Problem(
  "After an overflow the step returns the old loss-scale state, so the loss"
  " scale never decreases: after the first overflow, every step is skipped.",
  "Return the opt_state that update returns, unchanged, since"
  " with_loss_scaling already keeps the old optimizer state of a skipped step."
  " Select only other state, such as batch statistics, with"
  " ols.select_if_finite.",
)
MULTI_STEPS = _reports.Problem(
  "optax.MultiSteps is around with_loss_scaling. It hides an overflow of the"
  " first micro-batches from update, and keeps the old loss-scale state.",
  "Put it inside: ols.with_loss_scaling(optax.MultiSteps(inner, n)).",
)
_MEMBER_STATE = _reports.Problem(
  "If only the last of {size} members overflows, its loss-scale state is not"
  " the one that update returns, so its loss scale never decreases: after its"
  " first overflow, every step of this member is skipped.",
  "Return the state of each member: jax.vmap(tx.update)(grads, opt_state,"
  " params).",
)
_CONSTANT_SCALE = _reports.Problem(
  "The step returns a constant loss scale, so it never decreases: if the scale"
  " is too high, every step is skipped.",
  "Call ols.set_loss_scale once, before training, and return the opt_state that"
  " update returns, unchanged.",
)
_RAISED_SCALE = _reports.Problem(
  "The step returns a higher loss scale than update does ({scale:g} instead of"
  " {new_scale:g}): if an overflow needs a lower one, every later step is"
  " skipped.",
  "Return the opt_state that update returns, unchanged. Bounds are arguments"
  " of the policy: ols.DynamicLossScale(min_scale=..., max_scale=...).",
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
_ADJUSTED_TWICE = _reports.Problem(
  "After update, the step adjusts the loss-scale state again, so the loss scale"
  " decreases twice as fast.",
  "Drop policy.adjust, since update adjusts the state, and return the opt_state"
  " that update returns.",
)
WAITS = (
  "what the step returns: a condition keeps the old parameters and the old"
  " opt_state in this step. Check one in which update is applied."
)

# The power of two with which gradients that do not overflow still don't.
_LOG2_DECREASE = -8


def check_dependence(
  runs: _step_runs.StepRuns, ran_indices: Sequence[int]
) -> list[_reports.Problem] | None:
  """Check that the results may depend on the state that each `update` returns.

  Args:
    runs: the runs of the step.
    ran_indices: the indices of the updates that ran.

  Returns:
    The mistakes; None if no result is an optimizer state.
  """
  traced = runs.traced
  states = [x for x in traced.outputs if x.kind == "state_scale"]
  # A state may be returned as a list of leaves, which nothing identifies.
  results = [x for x in traced.outputs if x.kind in _outputs.RETURNED_KINDS]
  returned = frozenset().union(*(x.new_scales for x in states or results))
  if not states and not returned:
    return None
  mistakes = []
  missing = {*ran_indices} - returned - _list_inner_updates(traced)
  if missing and not _counts_skips(runs):
    mistakes.append(_OLD_STATE if states else NO_STATE)
  elif _has_old_inner_state(traced):
    mistakes.append(_OLD_INNER_STATE)
  return mistakes


def _counts_skips(runs: _step_runs.StepRuns) -> bool:
  """Return whether an overflow changes each count of skipped steps.

  Values are not followed through a Ref, but they are in it.
  """
  if runs.overflow_outs is None:
    return False
  before, after = (
    runs.traced.read_kind(outs, "state_skip_count")
    for outs in (runs.outs, runs.overflow_outs)
  )
  return bool(before) and not any(map(np.array_equal, before, after))


def _list_inner_updates(traced: _tracing.TracedFunction) -> set[int]:
  """Return the updates on whose results the gradients of others depend.

  The state of such a virtual or inner update may be dropped on purpose.
  """
  return {i for x in traced.grad_outputs for i in x.new_updates - {x.group}}


def _has_old_inner_state(traced: _tracing.TracedFunction) -> bool:
  """Return whether all arrays of an inner state are those of the arguments."""
  regions, outvars = traced.get_regions(), traced.closed_jaxpr.jaxpr.outvars
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
    and not any(output.depends_on_update for output, _ in rows)
  )


def check_after_overflow(
  runs: _step_runs.StepRuns,
  overflow_outs: Sequence[Any],
) -> Iterator[_reports.Problem | str]:
  """Check the loss-scale states that come back after an overflow.

  Each must have a count of skipped steps, and a loss scale, that an `update`
  returned.

  Args:
    runs: the runs of the step.
    overflow_outs: its outputs after an overflow.

  Yields:
    Mistakes, and sentences on what could not be checked.
  """
  traced = runs.traced
  if _has_multi_steps(traced):
    yield MULTI_STEPS
    return
  flags = _scaling_mistakes.read_applied_flags(traced, runs.outs)
  overflow_flags = _scaling_mistakes.read_applied_flags(traced, overflow_outs)
  pairs = zip(flags, overflow_flags, strict=True)
  if any((x >= 0).any() and (y < 0).all() for x, y in pairs):
    yield _NO_UPDATE_AFTER_OVERFLOW
  is_returned, is_waiting = _compare_counts(runs, overflow_outs)
  if _has_update_without(is_returned):
    state_counts = traced.read_kind(overflow_outs, "state_skip_count")
    new_counts = traced.read_kind(overflow_outs, "new_skip_count")
    if np.max(state_counts[0]) > max(map(np.max, new_counts)):
      yield _ADJUSTED_TWICE
    else:
      yield _STATE_PUT_BACK
  elif is_waiting:
    yield WAITS


def _compare_counts(
  runs: _step_runs.StepRuns, overflow_outs: Sequence[Any]
) -> tuple[list[tuple[frozenset[int], bool]], bool]:
  """Compare the counts of skipped steps with those that each `update` returns.

  If a condition keeps the old parameters, it may keep the old state, too.

  Returns:
    For each state whose updates were all skipped, these updates, and whether
    its count is that of an update, or is kept back; and whether any is.
  """
  traced = runs.traced
  flags = _scaling_mistakes.read_applied_flags(traced, overflow_outs)
  applied_flags = _scaling_mistakes.read_applied_flags(traced, runs.outs)
  skipped = {i for i, flag in enumerate(flags) if (flag == 0).any()}
  new_counts = traced.read_kind(overflow_outs, "new_skip_count")
  state_counts = traced.read_kind(overflow_outs, "state_skip_count")
  is_returned = []
  any_waits = False
  for indices, count in zip(_list_states(traced), state_counts, strict=True):
    if not indices or not indices <= skipped or not new_counts:
      continue
    applied = [applied_flags[i] for i in indices]
    mask = np.any([_match(count, new_counts[i]) for i in indices], axis=0)
    if not mask.all() and any((x == 1).any() for x in applied):
      is_kept = ~mask & ~_find_moved(runs, overflow_outs, indices, count.shape)
      any_waits |= bool(is_kept.any())
      mask |= is_kept
    is_returned.append((indices, bool(mask.all())))
  return is_returned, any_waits


def _match(count: np.ndarray, new_count: np.ndarray) -> np.ndarray:
  """Return which members of an ensemble have a count that an update returned.

  Args:
    count: the counts of skipped steps that the step returned.
    new_count: those that `update` returned. Those of a loop are stacked.
  """
  size = max(new_count.ndim - count.ndim, 0)
  is_of_members = new_count.shape[size:] == count.shape
  shape = count.shape if is_of_members else (1,) * count.ndim
  return (new_count.reshape((-1, *shape)) == count).any(axis=0)


def _find_moved(
  runs: _step_runs.StepRuns,
  overflow_outs: Sequence[Any],
  indices: frozenset[int],
  shape: tuple[int, ...],
) -> np.ndarray:
  """Return whether an overflow changes results of these updates.

  Args:
    runs: the runs of the step.
    overflow_outs: its outputs after an overflow.
    indices: the updates.
    shape: the shape of the loss scale: empty, or that of an ensemble.

  Returns:
    A flag for each member of the ensemble, with this shape.
  """
  pairs = [
    (x, y)
    for output, x, y in zip(
      runs.traced.outputs, runs.outs, overflow_outs, strict=True
    )
    if output.is_trained
    and indices & output.new_updates
    and x.shape[: len(shape)] == shape
  ]
  rows = [_host_values.find_different_rows(x, y, len(shape)) for x, y in pairs]
  return np.any(_host_values.to_host(rows) or [np.ones(shape, bool)], axis=0)


def check_with_other_scales(
  runs: _step_runs.StepRuns,
) -> list[_reports.Problem]:
  """Check that a step with another loss scale returns another loss scale.

  So must each `update`, or it uses another state than that of the arguments.
  """
  traced = runs.traced
  overflow_outs = runs.overflow_outs
  decreased_outs = runs.run_with_factor(2.0**_LOG2_DECREASE)
  inner_updates = _list_inner_updates(traced)
  flags = _scaling_mistakes.read_applied_flags(traced, runs.outs)
  pairs = zip(
    traced.read_kind(runs.outs, "update_scale"),
    traced.read_kind(decreased_outs, "update_scale"),
    strict=True,
  )
  if any(
    np.array_equal(x, y)
    for i, (x, y) in enumerate(pairs)
    if i not in inner_updates and (flags[i] >= 0).any()
  ):
    return [_UNUSED_STATE]
  assert overflow_outs is not None
  triples = zip(
    _list_states(traced),
    traced.read_kind(overflow_outs, "state_scale"),
    traced.read_kind(decreased_outs, "state_scale"),
    strict=True,
  )
  is_variable = [
    (indices, not np.array_equal(x, y)) for indices, x, y in triples
  ]
  if _has_update_without(is_variable):
    return [_CONSTANT_SCALE]
  return _check_bounds(traced, decreased_outs) or _check_members(runs)


def _check_bounds(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_reports.Problem]:
  """Check that no returned loss scale is above those of its updates."""
  flags = _scaling_mistakes.read_applied_flags(traced, outs)
  scales = traced.read_kind(outs, "state_scale")
  new_scales = traced.read_kind(outs, "new_scale")
  for indices, scale in zip(_list_states(traced), scales, strict=True):
    new = [
      np.max(x)
      for i, (x, flag) in enumerate(zip(new_scales, flags, strict=False))
      if i in indices and (flag >= 0).all()
    ]
    highest = max(new, default=math.inf)
    if np.max(scale) > highest:
      return [
        _reports.fill_in_names(
          _RAISED_SCALE, scale=float(np.max(scale)), new_scale=float(highest)
        )
      ]
  return []


def _check_members(runs: _step_runs.StepRuns) -> list[_reports.Problem]:
  """Check the state of an ensemble of which only the last member overflows."""
  traced = runs.traced
  sizes = {traced.inputs[i].size for i in traced.scale_indices}
  if sizes == {1}:
    return []
  inputs = list(traced.inputs)
  for i in traced.scale_indices:
    factor = np.ones(inputs[i].shape, inputs[i].dtype)
    factor[..., -1:] = math.inf
    inputs[i] = inputs[i] * factor
  outs = runs.run(inputs)
  is_returned, _ = _compare_counts(runs, outs)
  if _has_update_without(is_returned):
    return [_reports.fill_in_names(_MEMBER_STATE, size=max(sizes))]
  return []


def _list_states(traced: _tracing.TracedFunction) -> list[frozenset[int]]:
  """Return the updates that each loss-scale state of the results depends on."""
  return [x.new_scales for x in traced.outputs if x.kind == "state_scale"]


def _has_update_without(flags: Sequence[tuple[frozenset[int], bool]]) -> bool:
  """Return whether no state of an update has a flag.

  A step may return several states of an update, such as that of the best step.

  Args:
    flags: for each state, the updates that it depends on, and its flag.
  """
  updates = {i for indices, _ in flags for i in indices}
  return any(
    not any(flag for indices, flag in flags if i in indices) for i in updates
  )


def _has_multi_steps(traced: _tracing.TracedFunction) -> bool:
  """Return whether the loss-scale state is inside of one of `MultiSteps`."""
  names = [traced.input_names[i] for i in traced.scale_indices]
  return any("inner_opt_state" in _outputs.split_name(name) for name in names)
