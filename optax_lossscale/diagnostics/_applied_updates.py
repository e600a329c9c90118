"""Check by values that a step applies the updates that ``update`` returns."""

from collections.abc import Iterator, Sequence
import itertools
import math
from typing import Any

import jax.numpy as jnp

from optax_lossscale._jaxprs import _eqns, _regions
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

_LOST_UPDATES = _reports.Problem(
  "No parameter changes, although the updates are not zero: they are smaller"
  " than the distance to the next number of {dtype}.",
  "Keep float32 master weights: tx = ols.with_master_weights(tx). Or keep the"
  " parameters in float32, and cast them in the model to the dtype in which it"
  " computes.",
)
_UNCHANGED_PARAMS = _reports.Problem(
  "The step returns the old parameters, although the updates are not zero.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
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
  "whether the parameters change: a condition keeps the old ones in this step."
  " Check a step in which they change."
)

_FLOAT32_EPS = float(jnp.finfo(jnp.float32).eps)


def check_dependence(
  runs: _step_runs.StepRuns, ran_indices: Sequence[int]
) -> list[_reports.Problem]:
  """Check that the results depend on the updates of each `update`.

  A value that depends on them through integers or Refs follows them.

  Args:
    runs: the runs of the step.
    ran_indices: the indices of the updates that ran.
  """
  traced = runs.traced
  outvars = traced.closed_jaxpr.jaxpr.outvars
  pairs = [
    (output, _eqns.get_shape(var))
    for output, var in zip(traced.outputs, outvars, strict=True)
  ]
  shapes_by_update: dict[int, list[tuple[int, ...]]] = {}
  for output, shape in pairs:
    if output.kind == "new_updates":
      shapes_by_update.setdefault(output.group, []).append(shape)
  returned = {
    i
    for output, shape in pairs
    for i in output.new_updates
    if output.is_trained and _may_be_param(shape, shapes_by_update.get(i, []))
  }
  missing = (shapes_by_update.keys() & {*ran_indices}) - returned
  is_missing = any(not _responds(runs, i, None) for i in missing)
  return [NO_PARAMS] if is_missing else []


def check_changes(
  runs: _step_runs.StepRuns, overflow_outs: Sequence[Any]
) -> Iterator[_reports.Problem | str]:
  """Check that a step changes the parameters.

  Args:
    runs: the runs of the step.
    overflow_outs: its outputs after an overflow, with the old parameters.

  Yields:
    Mistakes, and sentences on what could not be checked.
  """
  traced = runs.traced
  triples = list(zip(traced.outputs, runs.outs, overflow_outs, strict=True))
  updates_after = traced.read_updates(overflow_outs)
  for i, update in runs.updates.items():
    is_applied = (update.applied == 1).all()
    if not is_applied or not (updates_after[i].applied == 0).all():
      continue
    pairs = [
      (x, y)
      for output, x, y in triples
      if output.is_trained and i in output.new_updates
    ]
    pairs = _drop_scalars(pairs)
    if not pairs or _host_values.is_any_different(pairs):
      continue
    if _responds(runs, i, None):
      updates = _list_updates(runs, i)
      yield from _explain_unchanged_params([x for x, _ in pairs], updates)
    else:
      is_inverted = _responds(runs, i, overflow_outs)
      yield _UNCHANGED_PARAMS if is_inverted else KEPT_BACK


def check_crossed(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that the gradients of an update depend on what it is applied to.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  traced = runs.traced
  groups_by_update: dict[int, list[frozenset[int]]] = {}
  for x in _list_params(traced, carried) if len(runs.updates) > 1 else ():
    updates = traced.outputs[x.output_index].new_updates
    if len(updates) == 1:
      groups = _find_grad_groups(traced, x.input_index)
      (update,) = updates
      groups_by_update.setdefault(update, []).append(groups)
  # A pair of numbers may be a game, in which each gradient is the other number.
  depends_only_on = {
    i: next(iter(groups[0]))
    for i, groups in groups_by_update.items()
    if len(groups) > 1 and len({*groups}) == 1 and len(groups[0]) == 1
  }
  return [
    _reports.fill_in_names(_CROSSED_UPDATES, i=i, k=k)
    for i, k in depends_only_on.items()
    if i < k and depends_only_on.get(k) == i
  ]


def _find_grad_groups(
  traced: _tracing.TracedFunction, argument: int
) -> frozenset[int]:
  """Return the updates whose gradients depend on an argument."""
  regions = traced.get_regions()
  outputs = [
    traced.outputs[_regions.get_output_index(key)]
    for key in regions.find_descendants([(_regions.ARGUMENT, argument)])
    if _regions.is_output(key)
  ]
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
  params = _list_params(traced, carried)
  if not params:
    return []

  def is_multiplied(log2_scale: int, factor: float) -> bool:
    """Return whether each parameter changes by a factor with another scale."""
    outs = runs.run_with_factor(2.0**log2_scale)
    return all(
      _scaling_mistakes.is_close(
        _scaling_mistakes.measure_ratio(
          runs.outs[x.output_index] - traced.inputs[x.input_index],
          outs[x.output_index] - traced.inputs[x.input_index],
        ),
        factor,
      )
      for x in params
    )

  # The changes of a step with noise differ in each run.
  return [
    _reports.fill_in_names(_SCALED_UPDATES, factor=factor)
    for factor in (2.0**_LOG2_FACTOR, 2.0**-_LOG2_FACTOR)
    if is_multiplied(_LOG2_FACTOR, factor) and is_multiplied(0, 1.0)
  ]


def _list_params(
  traced: _tracing.TracedFunction, carried: Sequence[_carried_arrays.Carried]
) -> list[_carried_arrays.Carried]:
  """Return the arrays on which a loss depends, and that receive updates."""
  return [
    x
    for x in carried
    if x.input_index in traced.flow.in_loss
    and traced.outputs[x.output_index].new_updates
  ]


def is_lost(problem: _reports.Problem) -> bool:
  """Return whether a problem is that no parameter changes."""
  return problem.fix == _LOST_UPDATES.fix


def _list_updates(runs: _step_runs.StepRuns, update: int) -> list[Any]:
  """Return the updates that an `update` makes."""
  return [
    x
    for output, x in zip(runs.traced.outputs, runs.outs, strict=True)
    if output.kind == "new_updates" and output.group == update
  ]


def _drop_scalars(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
  """Return the pairs of arrays; of scalars, if there are no others.

  A scalar may be a metric, unless the parameters are scalars.
  """
  return [(x, y) for x, y in pairs if x.size > 1] or pairs


def _responds(
  runs: _step_runs.StepRuns, update: int, overflow_outs: Sequence[Any] | None
) -> bool:
  """Return whether any result changes if the updates are replaced by ones.

  Args:
    runs: the runs of the step.
    update: the index of the update.
    overflow_outs: the outputs after an overflow, to ask for a step that
      overflows; None for the step itself.
  """
  replaced = {_outputs.TagGroup("masked_updates", update): 1.0}
  if overflow_outs is None:
    before, outs = runs.outs, runs.run_replaced(replaced)
  else:
    before = overflow_outs
    outs = runs.run_skipped(replaced) or before
  shapes = [x.shape for x in _list_updates(runs, update)]
  pairs = [
    (x, y)
    for output, x, y in zip(runs.traced.outputs, before, outs, strict=True)
    if output.kind in ("integers", *_outputs.RETURNED_KINDS)
    and not output.in_scale_state
    and _may_be_param(x.shape, shapes)
  ]
  return _host_values.is_any_different(pairs)


def _explain_unchanged_params(
  params: Sequence[Any], updates: Sequence[Any]
) -> Iterator[_reports.Problem | str]:
  """Yield why a step returns the old parameters: a mistake or a limitation."""
  update_amax = _host_values.compute_amax(updates)
  if update_amax == 0:
    yield (
      "whether the parameters change: all updates of this step are zero, as at"
      " the beginning of a warm-up"
    )
    return
  dtypes = sorted({x.dtype for x in params}, key=str)
  # No number changes only if each update is smaller than the distance to the
  # next number.
  eps = max(map(_get_eps, dtypes))
  text = " and ".join(map(str, dtypes))
  if update_amax > eps * _host_values.compute_amax(params):
    return  # They are at a bound, for example.
  if eps <= _FLOAT32_EPS:
    yield (
      f"whether the parameters change: the updates of this step are too small"
      f" for {text}, as at the beginning of a warm-up"
    )
  else:
    yield _reports.fill_in_names(_LOST_UPDATES, dtype=text)


def _get_eps(dtype: Any) -> float:
  return float(jnp.finfo(dtype).eps)


def _may_be_param(
  shape: tuple[int, ...], update_shapes: Sequence[tuple[int, ...]]
) -> bool:
  """Return whether a result that depends on updates may be parameters.

  It may also be a metric, such as the norm of the updates, or the losses of all
  steps of a loop.

  Args:
    shape: the shape of the result.
    update_shapes: the shapes of the updates. Those of a loop are stacked.
  """
  if math.prod(shape) <= 1:
    return max(map(math.prod, update_shapes), default=0) <= 1
  # The number of leading axes that all updates share, and that may be stacked.
  is_shared = lambda sizes: len(set(sizes)) == 1
  columns = zip(*update_shapes, strict=False)
  num_shared = len([*itertools.takewhile(is_shared, columns)])
  is_param_shape = any(
    shape == x[i:] for x in update_shapes for i in range(num_shared + 1)
  )
  # The parameters may be one array.
  return is_param_shape or math.prod(shape) >= min(
    map(math.prod, update_shapes), default=0
  )
