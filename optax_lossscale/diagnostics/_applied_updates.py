"""Check by values that a step applies the updates that ``update`` returns."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _entry_flow, _regions
from optax_lossscale.diagnostics import (
  _carried_arrays,
  _host_values,
  _outputs,
  _reports,
  _scaling_mistakes,
  _step_runs,
  _tracing,
)

# log2 of a factor on the loss scale that changes no update.
_LOG2_FACTOR = -4

NO_PARAMS = _reports.Problem(
  "The step does not return parameters that depend on the updates, so nothing"
  " is trained.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)
_UNCHANGED_PARAMS = _reports.Problem(
  "The step returns the old parameters, although the updates are not zero.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)
_OTHER_PARAMS = _reports.Problem(
  "The loss does not depend on the parameters that the step updates ({name}):"
  " it stays the same if they change.",
  "Pass the parameters of the step to the loss, and don't close over others:"
  " ols.value_and_grad(loss_fn, opt_state)(params, batch).",
)
_CROSSED_UPDATES = _reports.Problem(
  "The updates of two networks are crossed: only the gradients of update [{k}]"
  " depend on the parameters to which update [{i}] is applied, and vice versa.",
  "Apply each to its own parameters: params = optax.apply_updates(params,"
  " updates).",
)
_SCALED_UPDATES = _reports.Problem(
  "The parameters change {factor:g} times as much if the loss scale is"
  f" multiplied by 2**{_LOG2_FACTOR}: the updates are multiplied or divided by"
  " it.",
  "Apply the updates unchanged: params = optax.apply_updates(params, updates)."
  " The gradients that update receives are unscaled.",
)

KEPT_BACK = (
  "what the step returns: a condition keeps the old parameters and the old"
  " opt_state in this step. Check one in which update is applied."
)
_TINY_UPDATES = (
  "whether the parameters change: the updates of this step are zero, or too"
  " small for float32, as at the beginning of a warm-up"
)

_FLOAT32_EPS = float(jnp.finfo(jnp.float32).eps)
# A change is a sum of ones if it differs from it by at most this fraction.
_MAX_DISTANCE = 0.25


def check_dependence(
  runs: _step_runs.StepRuns,
  carried: Sequence[_carried_arrays.Carried],
  ran_indices: Sequence[int],
) -> list[_reports.Problem]:
  """Check that the results depend on the updates of each `update`.

  A value that depends on them through integers or Refs follows them.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
    ran_indices: the indices of the updates that ran.
  """
  outputs = runs.traced.outputs
  for update in ran_indices:
    params = _list_params(runs, carried, update)
    if (
      runs.base.select("new_updates", update)
      and not any(update in outputs[i].new_updates for i in params)
      and not _responds(runs, params, update)
    ):
      return [NO_PARAMS]
  return []


def check_changes(
  runs: _step_runs.StepRuns,
  carried: Sequence[_carried_arrays.Carried],
  skipped: _step_runs.Run,
) -> Iterator[_reports.Problem | str]:
  """Check that a step changes the parameters.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
    skipped: its run with an overflow, which keeps the old parameters.

  Yields:
    Mistakes, and sentences on what could not be checked.
  """
  base, outputs = runs.base, runs.traced.outputs
  for i, update in base.updates.items():
    if (update.applied != 1).any() or (skipped.updates[i].applied != 0).any():
      continue
    params = _list_params(runs, carried, i)
    trained = [k for k in params if i in outputs[k].new_updates]
    pairs = [(base.outs[k], skipped.outs[k]) for k in trained]
    if not pairs or _host_values.is_any_different(pairs):
      continue
    if not _responds(runs, params, i):
      is_inverted = _responds(runs, params, i, skipped)
      yield _UNCHANGED_PARAMS if is_inverted else KEPT_BACK
      continue
    # Those that only half precision loses are reported as stored arrays.
    # Parameters that do not change otherwise are at a bound, for example.
    limit = _FLOAT32_EPS * _host_values.compute_amax(x for x, _ in pairs)
    if _host_values.compute_amax(base.select("new_updates", i)) <= limit:
      yield _TINY_UPDATES


def check_unused(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that a loss depends on each parameter.

  Neither an unused one nor what follows from it by entries enters a function
  that is differentiated, such as the working copy of a master. Refs are not
  followed, so a run with other values must confirm it. The check skips arrays
  whose new value is not their sum with an update, such as an average of
  updates.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  traced, in_loss = runs.traced, runs.traced.flow.in_loss
  if not runs.base.select("loss"):
    return []
  # Arguments and gradients.
  list_sources = lambda x: (
    traced.flow.labels[x.output_index]
    - {
      _entry_flow.AFTER_GRADIENT,
      _entry_flow.RANDOM,
    }
  )
  used = set[_entry_flow.Label](in_loss).union(
    *(list_sources(x) for x in carried if x.input_index in in_loss)
  )
  # An average of parameters begins with their values, and a sum of updates has
  # their gradients.
  suspects = [
    x
    for x in carried
    if used.isdisjoint(list_sources(x))
    and traced.outputs[x.output_index].new_updates
  ]
  if not suspects:
    return []
  groups = {x for x in traced.tags.values() if x.kind == "masked_updates"}
  ones = runs.run(traced.inputs, dict.fromkeys(groups, 1.0))
  unused = [
    x.input_index
    for x in suspects
    if _adds_ones(traced.inputs[x.input_index], ones.outs[x.output_index])
  ]
  # The factor alone would not change zeros.
  inputs = [
    (1024 * x + 1).astype(x.dtype) if i in unused else x
    for i, x in enumerate(traced.inputs)
  ]
  changed = runs.run(inputs)
  if not unused or _host_values.is_any_different(
    zip(
      runs.base.select("loss") + runs.base.select("grads"),
      changed.select("loss") + changed.select("grads"),
      strict=True,
    )
  ):
    return []
  names = _reports.format_names([traced.input_names[i] for i in unused])
  return [_reports.fill_in_names(_OTHER_PARAMS, name=names)]


@_host_values.jit_quickly
def _adds_ones(old: Any, new: Any) -> jax.Array:
  """Return whether a number of ones was added to each entry; bool[]."""
  change = _arrays.upcast_for_reduction(new) - _arrays.upcast_for_reduction(old)
  number = jnp.round(jnp.mean(change))
  distance = jnp.max(jnp.abs(change - number), initial=0)
  return (number >= 1) & (distance <= _MAX_DISTANCE * number)


def check_crossed(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that the gradients of an update depend on what it is applied to.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  traced = runs.traced
  groups_by_updates: dict[frozenset[int], list[frozenset[int]]] = {}
  for x in _list_used(traced, carried) if len(runs.base.updates) > 1 else ():
    updates = traced.outputs[x.output_index].new_updates
    groups = _find_grad_groups(traced, x.input_index)
    groups_by_updates.setdefault(updates, []).append(groups)
  # A pair of numbers may be a game, in which each gradient is the other number.
  depends_only_on = {
    updates: groups[0]
    for updates, groups in groups_by_updates.items()
    if len(groups) > 1 and len({*groups}) == 1
  }
  return [
    _reports.fill_in_names(_CROSSED_UPDATES, i=min(updates), k=min(groups))
    for updates, groups in depends_only_on.items()
    if len(updates) == len(groups) == 1
    and min(updates) < min(groups)
    and depends_only_on.get(groups) == updates
  ]


def _find_grad_groups(
  traced: _tracing.TracedFunction, argument: int
) -> frozenset[int]:
  """Return the updates whose gradients depend on an argument."""
  indices = traced.regions.find_outputs([(_regions.ARGUMENT, argument)])
  outputs = [traced.outputs[i] for i in indices]
  return frozenset(x.group for x in outputs if x.kind == "grads")


def check_scaled(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that the change of the parameters is the same at each loss scale.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  traced = runs.traced
  params = _list_used(traced, carried)
  if not params:
    return []

  def is_multiplied(log2_scale: int, power: int) -> bool:
    """Return whether each parameter changes by a power of a half."""
    run = runs.run_with_factor(2.0**log2_scale)
    return all(
      _scaling_mistakes.is_power(
        _scaling_mistakes.measure_ratio(
          runs.base.outs[x.output_index] - traced.inputs[x.input_index],
          run.outs[x.output_index] - traced.inputs[x.input_index],
        ),
        power,
      )
      for x in params
    )

  # The changes of a step with noise differ in each run.
  return [
    _reports.fill_in_names(_SCALED_UPDATES, factor=2.0**-power)
    for power in (_LOG2_FACTOR, -_LOG2_FACTOR)
    if is_multiplied(_LOG2_FACTOR, power) and is_multiplied(0, 0)
  ]


def _list_used(
  traced: _tracing.TracedFunction, carried: Sequence[_carried_arrays.Carried]
) -> list[_carried_arrays.Carried]:
  """Return the arrays on which a loss depends, and that receive updates."""
  return [
    x
    for x in carried
    if x.input_index in traced.flow.in_loss
    and traced.outputs[x.output_index].new_updates
  ]


def _list_params(
  runs: _step_runs.StepRuns,
  carried: Sequence[_carried_arrays.Carried],
  update: int,
) -> list[int]:
  """Return the results that may be parameters, whatever they depend on.

  They replace arguments, or are as large as an update, since the parameters may
  be one array. A scalar may be a metric, unless all updates are scalars.
  """
  sizes = [x.size for x in runs.base.select("new_updates", update)]
  replacing = {x.output_index for x in carried}
  min_size, max_size = min(sizes, default=0), max(sizes, default=0)
  return [
    i
    for i, output in enumerate(runs.traced.outputs)
    if output.kind in ("integers", *_outputs.RETURNED_KINDS)
    and not (output.is_metric or output.in_scale_state)
    and (i in replacing or runs.base.outs[i].size >= min_size)
    and (runs.base.outs[i].size > 1 or max_size <= 1)
  ]


def _responds(
  runs: _step_runs.StepRuns,
  params: Sequence[int],
  update: int,
  skipped: _step_runs.Run | None = None,
) -> bool:
  """Return whether parameters change if the updates are replaced by ones.

  Args:
    runs: the runs of the step.
    params: the indices of results that may be parameters.
    update: the number of the update.
    skipped: the run with an overflow, to ask for a step that overflows; None
      for the step itself.
  """
  replaced = {_outputs.TagGroup("masked_updates", update): 1.0}
  before: _step_runs.Run = skipped or runs.base
  after = (
    runs.run(runs.traced.inputs, replaced)
    if skipped is None
    else runs.run_skipped(replaced) or skipped
  )
  return _host_values.is_any_different(
    (before.outs[i], after.outs[i]) for i in params
  )
