"""Check by values that ``p + u`` is among the results of a step.

Parameters, updates and results belong together if their paths end alike. If the
new value of a parameter is no sum, such as a projection, nothing is said of it.
"""

from collections.abc import Iterator, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _reports,
  _step_runs,
  _tracing,
)

_OLD_LEAF = _reports.Problem(
  "The step returns the old {name}, although its update is not zero: other"
  " parameters are new.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)
_OLD_PARAMS = _OLD_LEAF._replace(
  cause="The step returns the old parameters ({name}) next to an average of the"
  " new ones, although the updates are not zero."
)
_SUBTRACTED = _reports.Problem(
  "The updates are subtracted from the parameters ({name}), so training goes"
  " uphill.",
  "Add them, since they have the sign of a descent already: params ="
  " optax.apply_updates(params, updates).",
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
_SHARED_STATE = _reports.Problem(
  "Two networks ({name} and {other}) share one opt_state, so each mixes its"
  " moments with those of the other.",
  "Call tx.init for each of them, or train both with one update:"
  " params = {'a': params_a, 'b': params_b}.",
)

# A result is a sum if it differs from it by at most this fraction of the
# update, as a norm.
_MAX_DISTANCE = 0.25
_BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)


class ParamSums:
  """The sums of parameters and updates among the results of a step.

  Args:
    runs: the runs of the step.

  Attributes:
    sums: the parameters whose new value is a sum.
  """

  def __init__(self, runs: _step_runs.StepRuns) -> None:
    self._runs = runs
    triples = list(_match_params(runs.traced, runs.outs))
    flags = _host_values.to_host(
      [_is_sum(x.param, x.update, x.result) for x in triples]
    )
    self.sums = [x for x, flag in zip(triples, flags, strict=True) if flag]
    self._others = [
      x for x, flag in zip(triples, flags, strict=True) if not flag
    ]

  def find_mistakes(self) -> list[_reports.Problem]:
    """Return the first mistake in how updates are applied."""
    new_trees = {x.trees for x in self.sums}
    # If one sum was rounded to half precision, so were the others.
    checked = [*self.sums[:1], *self._others]
    comparisons = _host_values.to_host(
      [_compare_sum(x.param, x.update, x.result) for x in checked]
    )
    for x, comparison in zip(checked, comparisons, strict=True):
      if comparison.is_difference and not self.sums:
        return [_reports.fill_in_names(_SUBTRACTED, name=x.name)]
      if comparison.is_sum_in_half:
        return [_reports.fill_in_names(_SUM_IN_HALF, name=x.name)]
      is_old = comparison.is_unchanged and not x.depends_on_update
      if not is_old or not comparison.is_nonzero:
        continue
      if x.trees in new_trees:
        return [_reports.fill_in_names(_OLD_LEAF, name=x.name)]
      if not self.sums and not _has_new_params(self._runs, x):
        return [_reports.fill_in_names(_OLD_PARAMS, name=x.name)]
    return self._check_shared_state() or self._check_loss()

  def _check_shared_state(self) -> list[_reports.Problem]:
    """Check that updates with one state add to the same parameters."""
    traced = self._runs.traced
    scales = [traced.inputs[i] for i in traced.scale_indices]
    has_moments = any(
      "inner_state" in _outputs.split_name(output.name)
      and output.depends_on_update
      for output in traced.outputs
      if output.kind in _outputs.RETURNED_KINDS
    )
    if len(scales) != 1 or scales[0].size != 1 or not has_moments:
      return []
    trees_by_update: dict[int, set[Any]] = {}
    for x in self.sums:
      trees_by_update.setdefault(x.group, set()).add(x.trees[0])
    pairs = itertools.combinations(trees_by_update.values(), 2)
    separate = [pair for pair in pairs if pair[0].isdisjoint(pair[1])]
    if not separate:
      return []
    name, other = (".".join(min(trees)) or "params" for trees in separate[0])
    return [_reports.fill_in_names(_SHARED_STATE, name=name, other=other)]

  def _check_loss(self) -> list[_reports.Problem]:
    """Check that loss or gradients change if the updated parameters do.

    The value of a surrogate loss may be constant, such as a ratio to itself.
    """
    traced = self._runs.traced
    params = {x.param_index: x for x in self.sums}
    if not params or not traced.select_kind(self._runs.outs, "loss"):
      return []
    new_params = {i: x.result for i, x in params.items()}
    if self._depends_on(new_params):
      return []
    # The updates may be lost in half precision, or in a loss that is large. The
    # factor alone would not change zeros.
    far_params = {i: 1024 * x + 1 for i, x in new_params.items()}
    if self._depends_on(far_params):
      return []
    return [_reports.fill_in_names(_OTHER_PARAMS, name=self.sums[0].name)]

  def _depends_on(self, params: dict[int, Any]) -> bool:
    """Return whether loss or gradients change with these parameters."""
    traced = self._runs.traced
    outs = self._runs.run(
      [
        params[i].astype(jax.dtypes.canonicalize_dtype(x.dtype))
        if i in params
        else x
        for i, x in enumerate(traced.inputs)
      ]
    )
    triples = zip(traced.outputs, self._runs.outs, outs, strict=True)
    return _host_values.is_any_different(
      (x, y) for output, x, y in triples if output.kind in ("loss", "grads")
    )


def _has_new_params(runs: _step_runs.StepRuns, x: "_UpdatedParam") -> bool:
  """Return whether a result changes with the updates, and not only a little.

  An average of parameters changes by a fraction of them.
  """
  outs = runs.run_replaced({_outputs.TagGroup("masked_updates", x.group): 1.0})
  responses = [
    _measure_response(before, after, x.update)
    for output, before, after in zip(
      runs.traced.outputs, runs.outs, outs, strict=True
    )
    if output.kind in _outputs.RETURNED_KINDS
    and output.new_updates
    and before.shape == x.update.shape
  ]
  return any(_host_values.to_host(responses))


@jax.jit
def _measure_response(before: Any, after: Any, update: Any) -> jax.Array:
  """Return whether a result follows an update that is replaced by ones."""
  x, y, u = map(_arrays.upcast_for_reduction, (before, after, update))
  return _norm(y - x, 1) > _MAX_DISTANCE * _norm(1 - u, 1)


class _UpdatedParam(NamedTuple):
  """A parameter, its update, and the result that may be its next value.

  Attributes:
    trees: the names of the trees that contain the parameter and the result.
    name: the name of the update.
    group: the index of the `update`.
    depends_on_update: whether the result depends on updates.
    param_index: the index of the parameter among the inputs.
    param, update, result: the arrays.
  """

  trees: tuple[Any, Any]
  name: str
  group: int
  depends_on_update: bool
  param_index: int
  param: Any
  update: Any
  result: Any


def _match_params(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> Iterator[_UpdatedParam]:
  """Yield arguments and results whose paths end like that of an update."""
  arguments = [
    (_outputs.split_name(name), x, i)
    for i, (name, x) in enumerate(
      zip(traced.input_names, traced.inputs, strict=True)
    )
  ]
  outputs = list(zip(traced.outputs, outs, strict=True))
  results = [
    (_outputs.split_name(output.name), x, int(bool(output.new_updates)))
    for output, x in outputs
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
    matches = [
      x.get((keys, update.shape), ())
      for x in (arguments_by_key, results_by_key)
    ]
    for (param_tree, param, index), (
      result_tree,
      result,
      depends,
    ) in itertools.product(*matches):
      yield _UpdatedParam(
        (param_tree, result_tree),
        output.name,
        output.group,
        bool(depends),
        index,
        param,
        update,
        result,
      )


def _index_leaves(
  leaves: Sequence[tuple[tuple[str, ...], Any, int]], length: int
) -> dict[Any, list[Any]]:
  """Group float arrays by their shapes and the last keys of their paths.

  Args:
    leaves: for each array its path, itself, and a number.
    length: the number of keys.

  Returns:
    For each key of a group the leaves, with the other keys of their paths.
  """
  index: dict[Any, list[Any]] = {}
  for path, x, number in leaves:
    if _arrays.is_inexact(x) and "inner_state" not in path:
      split = max(len(path) - length, 0)
      key = path[split:], x.shape
      index.setdefault(key, []).append((path[:split], x, number))
  return index


@jax.jit
def _is_sum(param: Any, update: Any, result: Any) -> jax.Array:
  """Return whether a result is the parameter plus the update."""
  p, u, r = map(_arrays.upcast_for_reduction, (param, update, result))
  unit = jnp.max(jnp.abs(u), initial=0)
  is_near = _norm(r - p - u, unit) <= _MAX_DISTANCE * _norm(u, unit)
  return is_near & _changes_param(p, u, result.dtype)


def _changes_param(p: Any, u: Any, dtype: Any) -> Any:
  """Return whether an update is more than the spacing of numbers."""
  unit = jnp.max(jnp.abs(u), initial=0)
  spacing = float(jnp.finfo(dtype).eps) * jnp.abs(p)
  is_larger = _norm(spacing, unit) < _MAX_DISTANCE * _norm(u, unit)
  return (unit > 0) & is_larger


def _norm(x: Any, unit: Any) -> Any:
  """Return the norm of an array over a unit, so that squares stay in range."""
  return jnp.sqrt(jnp.sum(jnp.abs(x / unit) ** 2))


class _SumComparison(NamedTuple):
  """Flags of a result that is compared with a sum; bool[] each.

  Attributes:
    is_difference: whether it is the parameter minus the update.
    is_unchanged: whether it is the parameter.
    is_nonzero: whether the update changes the parameter.
    is_sum_in_half: whether it is a float32 array of numbers of half precision,
      and near the sum.
  """

  is_difference: Any
  is_unchanged: Any
  is_nonzero: Any
  is_sum_in_half: Any


@jax.jit
def _compare_sum(param: Any, update: Any, result: Any) -> _SumComparison:
  p, u, r = map(_arrays.upcast_for_reduction, (param, update, result))
  unit = jnp.max(jnp.abs(u), initial=0)
  is_nonzero = _changes_param(p, u, result.dtype)
  is_half = lambda x: (
    jnp.all(x == x.astype(jnp.float16)) | jnp.all(x == x.astype(jnp.bfloat16))
  )
  is_unchanged = jnp.all(r == p)
  is_near = _norm(r - p - u, unit) <= _BFLOAT16_EPS * _norm(p, unit)
  is_float32 = result.dtype == jnp.float32 and param.dtype == jnp.float32
  is_rounded = is_float32 & is_half(r) & ~is_half(p + u) & ~is_unchanged
  return _SumComparison(
    is_difference=is_nonzero
    & (_norm(r - p + u, unit) <= _MAX_DISTANCE * _norm(u, unit)),
    is_unchanged=is_unchanged,
    is_nonzero=is_nonzero,
    is_sum_in_half=is_nonzero & is_near & is_rounded,
  )
