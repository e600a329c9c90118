"""Check by values that a step applies the updates that ``update`` returns."""

from collections.abc import Iterator, Sequence
import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _array_tests,
  _host_values,
  _problem,
  _scale_dependence,
  _tracing,
)

_LOST_UPDATES = _problem.Problem(
  "No parameter changes, although the updates are not zero: they are smaller"
  " than the distance to the next number of {dtype}.",
  "Keep the parameters in float32, and cast them to half precision in the"
  " model: ols.autocast(loss_fn), or params.astype(jnp.float16) in loss_fn.",
)
_PARTLY_LOST_UPDATES = _LOST_UPDATES._replace(
  cause="{fraction:.0%} of the updates don't change their parameters: they are"
  " smaller than the distance to the next number of {dtype}."
)

_UNCHANGED_PARAMS = _problem.Problem(
  "The step returns the old parameters, although the updates are not zero.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)

_OLD_LEAF = _problem.Problem(
  "The step returns the old {name}, although its update is not zero: other"
  " parameters are new.",
  "Return the new parameters: params = optax.apply_updates(params, updates).",
)
_SUBTRACTED = _problem.Problem(
  "The updates are subtracted from the parameters ({name}), so training goes"
  " uphill.",
  "Add them, since they have the sign of a descent already: params ="
  " optax.apply_updates(params, updates).",
)

# A result is a sum if it differs from it by at most this fraction of the
# update, as a norm.
_MAX_DISTANCE = 0.25
# The fraction of updates that may be lost in half precision.
_MAX_LOST_FRACTION = 0.5
_FLOAT32_EPS = float(jnp.finfo(jnp.float32).eps)


def check_changes(
  traced: _tracing.TracedFunction,
  outs: Sequence[Any],
  overflow_outs: Sequence[Any],
  flag_pairs: Sequence[tuple[Any, Any]],
) -> Iterator[_problem.Problem | str]:
  """Check that a step changes the parameters.

  Args:
    traced: the step.
    outs: the outputs of the step.
    overflow_outs: its outputs after an overflow, with the old parameters.
    flag_pairs: for each `update`, its flags in the step and after an overflow.

  Yields:
    Mistakes, and sentences on what could not be checked.
  """
  triples = list(zip(traced.outputs, outs, overflow_outs, strict=True))
  is_compared = [
    (flag == 1).all() and (overflow_flag == 0).all()
    for flag, overflow_flag in flag_pairs
  ]
  for i in itertools.compress(range(len(flag_pairs)), is_compared):
    pairs = [
      (x, y)
      for output, x, y in triples
      if output.kind in _scale_dependence.RETURNED_KINDS
      and i in output.new_updates
    ]
    # A scalar may be a metric, unless the parameters are scalars.
    pairs = [(x, y) for x, y in pairs if x.size > 1] or pairs
    has_changed = _array_tests.is_any_different(pairs)
    update_leaves = [
      x
      for output, x, _ in triples
      if output.kind == "new_updates" and output.group == i
    ]
    if not pairs or (has_changed and not _may_lose_updates(pairs)):
      continue
    if has_changed:
      yield from _check_lost_fraction(pairs, update_leaves)
    else:
      yield from _explain_unchanged_params([x for x, _ in pairs], update_leaves)


def check_sums(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> list[_problem.Problem]:
  """Look for ``p + u`` and ``p - u`` among the results.

  Parameters, updates and results belong together if their paths end alike. If
  the new value of a parameter is none of the two, such as a projection, nothing
  is said of it.

  Args:
    traced: the step.
    outs: its outputs.
  """
  triples = list(_match_params(traced, outs))
  comparisons = _host_values.to_host(
    [_compare_sum(x.param, x.update, x.result) for x in triples]
  )
  pairs = list(zip(triples, comparisons, strict=True))
  sums = {x.trees for x, comparison in pairs if comparison.is_sum}
  for x, comparison in pairs:
    if comparison.is_difference and not sums:
      return [_problem.fill_in_names(_SUBTRACTED, name=x.name)]
    is_old = comparison.is_unchanged and not x.depends_on_update
    if is_old and comparison.is_nonzero and x.trees in sums:
      return [_problem.fill_in_names(_OLD_LEAF, name=x.name)]
  return []


class _UpdatedParam(NamedTuple):
  """A parameter, its update, and the result that may be its next value.

  Attributes:
    trees: the names of the trees that contain the parameter and the result.
    name: the name of the update.
    depends_on_update: whether the result depends on updates.
    param, update, result: the arrays.
  """

  trees: tuple[Any, Any]
  name: str
  depends_on_update: bool
  param: Any
  update: Any
  result: Any


def _match_params(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> Iterator[_UpdatedParam]:
  """Yield arguments and results whose paths end like that of an update."""
  arguments = [
    (_split_name(name), x, False)
    for name, x in zip(traced.input_names, traced.inputs, strict=True)
  ]
  outputs = list(zip(traced.outputs, outs, strict=True))
  results = [
    (_split_name(output.name), x, bool(output.new_updates))
    for output, x in outputs
    if output.kind in _scale_dependence.RETURNED_KINDS
  ]
  index_by_length = functools.cache(
    lambda length: [_index_leaves(x, length) for x in (arguments, results)]
  )
  for output, update in outputs:
    if output.kind != "new_updates":
      continue
    keys = _split_name(output.name.removeprefix(f"[{output.group}]/"))
    matches = [
      index.get((keys, update.shape), ())
      for index in index_by_length(len(keys))
    ]
    for (param_tree, param, _), (
      result_tree,
      result,
      depends,
    ) in itertools.product(*matches):
      yield _UpdatedParam(
        (param_tree, result_tree), output.name, depends, param, update, result
      )


def _index_leaves(
  leaves: Sequence[tuple[tuple[str, ...], Any, bool]], length: int
) -> dict[Any, list[Any]]:
  """Group float arrays by their shapes and the last keys of their paths.

  Args:
    leaves: for each array its path, itself, and whether it depends on updates.
    length: the number of keys.

  Returns:
    For each key of a group the leaves, with the other keys of their paths.
  """
  index: dict[Any, list[Any]] = {}
  for path, x, depends in leaves:
    if _arrays.is_inexact(x) and "inner_state" not in path:
      split = max(len(path) - length, 0)
      key = path[split:], x.shape
      index.setdefault(key, []).append((path[:split], x, depends))
  return index


def _split_name(name: str) -> tuple[str, ...]:
  """Return the keys of a path: ``params['a/b'].c`` has four."""
  keys = re.findall(r"[^\[\]'\"./]+", name)
  # Flax NNX adds this key to the path of an array.
  return tuple(keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys)


class _SumComparison(NamedTuple):
  """Whether a result is a sum or a difference; bool[] each.

  Attributes:
    is_sum: whether it is the parameter plus the update.
    is_difference: whether it is the parameter minus the update.
    is_unchanged: whether it is the parameter.
    is_nonzero: whether the update changes the parameter.
  """

  is_sum: Any
  is_difference: Any
  is_unchanged: Any
  is_nonzero: Any


@jax.jit
def _compare_sum(param: Any, update: Any, result: Any) -> _SumComparison:
  p, u, r = (_arrays.upcast_for_reduction(x) for x in (param, update, result))
  # Squares stay in range.
  unit = jnp.max(jnp.abs(u), initial=0)
  norm = lambda x: jnp.sqrt(jnp.sum(jnp.abs(x / unit) ** 2))
  limit = _MAX_DISTANCE * norm(u)
  # An update that is lost in the spacing of numbers shows nothing.
  spacing = float(jnp.finfo(result.dtype).eps) * jnp.abs(p)
  is_nonzero = (unit > 0) & (norm(spacing) < limit)
  return _SumComparison(
    is_sum=is_nonzero & (norm(r - p - u) <= limit),
    is_difference=is_nonzero & (norm(r - p + u) <= limit),
    is_unchanged=jnp.all(r == p),
    is_nonzero=is_nonzero,
  )


def _explain_unchanged_params(
  params: Sequence[Any], updates: Sequence[Any]
) -> Iterator[_problem.Problem | str]:
  """Yield why a step returns the old parameters: a mistake or a limitation."""
  update_amax = _array_tests.compute_amax(updates)
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
  if update_amax > eps * _array_tests.compute_amax(params):
    yield _UNCHANGED_PARAMS
  elif eps <= _FLOAT32_EPS:
    yield (
      f"whether the parameters change: the updates of this step are too small"
      f" for {text}, as at the beginning of a warm-up"
    )
  else:
    yield _problem.fill_in_names(_LOST_UPDATES, dtype=text)


def _may_lose_updates(pairs: Sequence[tuple[Any, Any]]) -> bool:
  """Return whether most entries of half-precision parameters don't change."""
  half_pairs = [(x, y) for x, y in pairs if _get_eps(x.dtype) > _FLOAT32_EPS]
  num_entries = sum(x.size for x, _ in half_pairs)
  num_changed = _array_tests.count_different(half_pairs)
  return num_entries - num_changed > _MAX_LOST_FRACTION * num_entries


def _check_lost_fraction(
  pairs: Sequence[tuple[Any, Any]], updates: Sequence[Any]
) -> Iterator[_problem.Problem]:
  """Check that a step changes most parameters that have an update.

  Args:
    pairs: the results that depend on the updates, and the same for a skipped
      step. They may also be averages or master copies of parameters.
    updates: the updates. Those of a loop are stacked, and are not compared.
  """
  num_updates = _array_tests.count_nonzero(updates)
  num_lost = num_updates - _array_tests.count_different(pairs)
  is_stacked = sum(x.size for x in updates) > sum(x.size for x, _ in pairs)
  if is_stacked or num_lost <= _MAX_LOST_FRACTION * num_updates:
    return
  half_dtypes = {x.dtype for x, _ in pairs if _get_eps(x.dtype) > _FLOAT32_EPS}
  text = " and ".join(sorted(map(str, half_dtypes)))
  fraction = num_lost / num_updates
  yield _problem.fill_in_names(
    _PARTLY_LOST_UPDATES, dtype=text, fraction=fraction
  )


def _get_eps(dtype: Any) -> float:
  return float(jnp.finfo(dtype).eps)
