"""Check by values that ``p + u`` is among the results of a step.

Parameters, updates and results belong together if their paths end alike. If the
new value of a parameter is no sum, such as a projection, nothing is said of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _carried_arrays,
  _host_values,
  _outputs,
  _reports,
  _step_runs,
)

_SUM_IN_HALF = _reports.Problem(
  "The new parameters ({name}) are stored in float32, but the sum of parameter"
  " and update was rounded to half precision, so small updates are"
  " lost.",
  "Add in float32: params = optax.apply_updates(params, updates). Cast to half"
  " precision in the model only.",
)
_OTHER_PARAMS = _reports.Problem(
  "The loss does not depend on the parameters that the step updates ({name}):"
  " it stays the same if they change.",
  "Pass the parameters of the step to the loss, and don't close over others:"
  " ols.value_and_grad(loss_fn, opt_state)(params, batch).",
)

# A result is a sum if it differs from it by at most this fraction of the
# update, as a norm.
_MAX_DISTANCE = 0.25
_BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)


class _ParamSum(NamedTuple):
  """A parameter whose new value may be the sum of the old one and an update.

  Attributes:
    name: the name of the update.
    carried: the parameter.
    is_sum: whether its new value is the sum.
    is_in_half: whether its new value is a rounded sum in float32.
  """

  name: str
  carried: _carried_arrays.Carried
  is_sum: bool
  is_in_half: bool


def check_sums(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that no sum in float32 is rounded to half precision.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  rounded = [
    x
    for x in carried
    if runs.traced.outputs[x.output_index].new_updates
    and runs.outs[x.output_index].dtype == jnp.float32
    and _is_half_valued(runs.outs[x.output_index])
  ]
  names = [x.name for x in _list_sums(runs, rounded) if x.is_in_half]
  return [_reports.fill_in_names(_SUM_IN_HALF, name=x) for x in names[:1]]


def check_unused(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_reports.Problem]:
  """Check that a loss depends on each parameter.

  Neither an unused one nor what follows from it by entries enters a function
  that is differentiated, such as the working copy of a master. Refs are not
  followed, so a run with other values must confirm it.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  traced, in_loss = runs.traced, runs.traced.flow.in_loss
  if not traced.select_kind(runs.outs, "loss"):
    return []
  list_arguments = lambda x: traced.flow.list_arguments(x.output_index)
  used = in_loss.union(
    *(list_arguments(x) for x in carried if x.input_index in in_loss)
  )
  # An average of parameters begins with their values.
  suspects = [x for x in carried if used.isdisjoint(list_arguments(x))]
  unused = {
    x.carried.input_index: x.name
    for x in _list_sums(runs, suspects)
    if x.is_sum
  }
  # The factor alone would not change zeros.
  inputs = [
    (1024 * x + 1).astype(x.dtype) if i in unused else x
    for i, x in enumerate(traced.inputs)
  ]
  if not unused or _host_values.is_any_different(
    (x, y)
    for output, x, y in zip(
      traced.outputs, runs.outs, runs.run(inputs), strict=True
    )
    if output.kind in ("loss", "grads")
  ):
    return []
  names = _reports.format_names([*unused.values()])
  return [_reports.fill_in_names(_OTHER_PARAMS, name=names)]


def _list_sums(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> list[_ParamSum]:
  """Return what replaces an argument whose path ends like that of an update."""
  traced = runs.traced
  pairs = [
    (x, _outputs.split_name(traced.input_names[x.input_index])) for x in carried
  ]
  rows = [
    (output.name, x, traced.inputs[x.input_index], update)
    for output, update in zip(traced.outputs, runs.outs, strict=True)
    if output.kind == "new_updates"
    for x, path in pairs
    if "inner_state" not in path
    and _ends_like(path, output)
    # Those of a loop are stacked.
    and runs.outs[x.output_index].shape in (update.shape, update.shape[1:])
  ]
  comparisons = _host_values.to_host(
    [
      _compare_with_sum(
        param,
        update if update.shape == param.shape else jnp.sum(update, 0),
        runs.outs[x.output_index],
      )
      for _, x, param, update in rows
    ]
  )
  return [
    _ParamSum(name, x, bool(is_sum), bool(is_in_half))
    for (name, x, *_), (is_sum, is_in_half) in zip(
      rows, comparisons, strict=True
    )
  ]


def _ends_like(path: tuple[str, ...], update: _outputs.Output) -> bool:
  """Return whether the path of an argument ends like that of an update."""
  name = update.name.removeprefix(f"[{update.group}]/")
  keys = _outputs.split_name(name)
  return path[max(len(path) - len(keys), 0) :] == keys


@jax.jit
def _compare_with_sum(
  param: Any, update: Any, result: Any
) -> tuple[jax.Array, jax.Array]:
  """Return whether a result is a sum, and whether it was rounded.

  Args:
    param: the parameter.
    update: its update.
    result: the result.

  Returns:
    Whether the result is the parameter plus the update; and whether it is a
    float32 array of numbers of half precision near this sum; bool[] each.
  """
  p, u, r = map(_arrays.upcast_for_reduction, (param, update, result))
  unit = jnp.max(jnp.abs(u), initial=0)
  distance = _norm(r - p - u, unit)
  # The update must be more than the spacing of numbers.
  spacing = float(jnp.finfo(result.dtype).eps) * jnp.abs(p)
  limit = _MAX_DISTANCE * _norm(u, unit)
  is_changing = (unit > 0) & (_norm(spacing, unit) < limit)
  is_float32 = result.dtype == jnp.float32 and param.dtype == jnp.float32
  is_rounded = (
    is_float32 & _is_half_valued(r) & ~_is_half_valued(p + u) & jnp.any(r != p)
  )
  is_near = distance <= _BFLOAT16_EPS * _norm(p, unit)
  return is_changing & (distance <= limit), is_changing & is_near & is_rounded


@jax.jit
def _is_half_valued(x: Any) -> jax.Array:
  """Return whether a dtype of half precision holds all entries; bool[]."""
  return jnp.all(x == x.astype(jnp.float16)) | jnp.all(
    x == x.astype(jnp.bfloat16)
  )


def _norm(x: Any, unit: Any) -> Any:
  """Return the norm of an array over a unit, so that squares stay in range."""
  return jnp.sqrt(jnp.sum(jnp.abs(x / unit) ** 2))
