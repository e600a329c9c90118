"""Check by values that ``p + u`` is among the results of a step.

Parameters, updates and results belong together if their paths end alike. If the
new value of a parameter is no sum, such as a projection, nothing is said of it.
"""

from collections.abc import Iterable, Iterator, Sequence
import functools
import itertools
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
  _tracing,
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


class ParamSums(NamedTuple):
  """The sums of parameters and updates among the results of a step.

  Attributes:
    names: the name of each parameter whose new value is a sum, by the index of
      the parameter among the inputs.
    mistakes: mistakes in how updates are applied.
  """

  names: dict[int, str]
  mistakes: list[_reports.Problem]


def find_param_sums(
  runs: _step_runs.StepRuns, carried: Sequence[_carried_arrays.Carried]
) -> ParamSums:
  """Find the new parameters among the results of a step, and check them.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
  """
  matches = list(_match_params(runs.traced, runs.outs))
  comparisons = _host_values.to_host(
    [_compare_with_sum(x.param, x.update, x.result) for x in matches]
  )
  pairs = list(zip(matches, comparisons, strict=True))
  sums = {x.param_index: x for x, (is_sum, _) in pairs if is_sum}
  names = {i: x.name for i, x in sums.items()}
  in_half = [x.name for x, (_, is_in_half) in pairs if is_in_half]
  mistakes = []
  if in_half:
    mistakes = [_reports.fill_in_names(_SUM_IN_HALF, name=in_half[0])]
  elif unused := _find_unused(
    runs, carried, {i: x.result for i, x in sums.items()}
  ):
    unused_names = _reports.format_names([names[i] for i in unused])
    mistakes = [_reports.fill_in_names(_OTHER_PARAMS, name=unused_names)]
  return ParamSums(names, mistakes)


def _find_unused(
  runs: _step_runs.StepRuns,
  carried: Sequence[_carried_arrays.Carried],
  new_params: dict[int, Any],
) -> list[int]:
  """Return the parameters on which no loss depends, as indices of inputs.

  Neither they nor what follows from them by entries enters a function that is
  differentiated, such as the working copy of a master. Refs are not followed,
  so that a run with other values must confirm it.

  Args:
    runs: the runs of the step.
    carried: its results that replace arguments.
    new_params: the new value of each parameter, by the index of the input.
  """
  traced = runs.traced
  in_loss = traced.flow.in_loss
  unused = [
    i
    for i in new_params
    if i not in in_loss
    and not any(
      x.input_index in in_loss and i in traced.flow.labels[x.output_index]
      for x in carried
    )
  ]
  if not unused or not traced.select_kind(runs.outs, "loss"):
    return []
  # The factor alone would not change zeros.
  inputs = [
    (1024 * x + 1).astype(x.dtype) if i in unused else x
    for i, x in enumerate(traced.inputs)
  ]
  triples = zip(traced.outputs, runs.outs, runs.run(inputs), strict=True)
  depends = _host_values.is_any_different(
    (x, y) for output, x, y in triples if output.kind in ("loss", "grads")
  )
  return [] if depends else unused


class _Match(NamedTuple):
  """A parameter, its update, and the result that may be its next value.

  Attributes:
    name: the name of the update.
    param_index: the index of the parameter among the inputs.
    param, update, result: the arrays.
  """

  name: str
  param_index: int
  param: Any
  update: Any
  result: Any


def _match_params(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> Iterator[_Match]:
  """Yield arguments and results whose paths end like that of an update."""
  arguments = list(
    enumerate(zip(traced.input_names, traced.inputs, strict=True))
  )
  outputs = list(zip(traced.outputs, outs, strict=True))
  results = [
    (i, (output.name, x))
    for i, (output, x) in enumerate(outputs)
    if output.kind in _outputs.RETURNED_KINDS
  ]
  index_by_length = functools.cache(
    lambda length: [_index_leaves(x, length) for x in (arguments, results)]
  )
  for output, update in outputs:
    if output.kind != "new_updates":
      continue
    keys = _outputs.split_name(output.name.removeprefix(f"[{output.group}]/"))
    arguments_by_key, results_by_key = index_by_length(len(keys))
    if update.ndim and (keys, update.shape) not in arguments_by_key:
      update = jnp.sum(update, 0)  # The updates of a loop are stacked.
    key = keys, update.shape
    for (index, param), (_, result) in itertools.product(
      arguments_by_key.get(key, ()), results_by_key.get(key, ())
    ):
      yield _Match(output.name, index, param, update, result)


def _index_leaves(
  leaves: Iterable[tuple[int, tuple[str, Any]]], length: int
) -> dict[Any, list[tuple[int, Any]]]:
  """Group float arrays by the last keys of their paths, and their shapes.

  Args:
    leaves: the index of each array, its name, and itself.
    length: the number of keys.

  Returns:
    For each group, the indices and the arrays.
  """
  index: dict[Any, list[tuple[int, Any]]] = {}
  for i, (name, x) in leaves:
    path = _outputs.split_name(name)
    if _arrays.is_inexact(x) and "inner_state" not in path:
      key = path[max(len(path) - length, 0) :], x.shape
      index.setdefault(key, []).append((i, x))
  return index


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
  is_half = lambda x: (
    jnp.all(x == x.astype(jnp.float16)) | jnp.all(x == x.astype(jnp.bfloat16))
  )
  is_float32 = result.dtype == jnp.float32 and param.dtype == jnp.float32
  is_rounded = is_float32 & is_half(r) & ~is_half(p + u) & jnp.any(r != p)
  is_near = distance <= _BFLOAT16_EPS * _norm(p, unit)
  return is_changing & (distance <= limit), is_changing & is_near & is_rounded


def _norm(x: Any, unit: Any) -> Any:
  """Return the norm of an array over a unit, so that squares stay in range."""
  return jnp.sqrt(jnp.sum(jnp.abs(x / unit) ** 2))
