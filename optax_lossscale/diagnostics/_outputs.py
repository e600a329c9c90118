"""The values that become outputs of a traced function.

They are the float results, the arrays that the function changes in its
arguments, and values with a tag, such as the gradients that ``update`` receives
(see ``_tags``).
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _arrays, _paths, _state, _tags
from optax_lossscale._jaxprs import _avals, _eqns, _harvest
from optax_lossscale.diagnostics import _scale_dependence

# The tags that show which loss scale ``update`` uses, and what becomes of its
# results.
_UPDATE_KINDS = {
  "new_updates", "new_scale", "new_skip_count", "update_scale"
}  # fmt: skip
# The tags whose values are left out if they cannot become outputs.
_OPTIONAL_KINDS = {*_UPDATE_KINDS, "loss", "unscaled"}


def collect_float_results(
  out: Any,
) -> list[tuple[_scale_dependence.Output, Any]]:
  """Return the float arrays in the result of a function, with their names.

  The items of a tuple are separate results, such as a loss and gradients.
  """
  # Only plain tuples are split: a named tuple, a dict or a list is one result.
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  leaves = [
    (i, (*outer_path, *inner_path), leaf)
    for i, (outer_path, result) in enumerate(results)
    for inner_path, leaf in jax.tree_util.tree_leaves_with_path(result)
  ]
  names = _paths.leaf_names(path for _, path, _ in leaves)
  return [
    (_scale_dependence.Output("result", name, i), leaf)
    for name, (i, _, leaf) in zip(names, leaves, strict=True)
    if _is_float_array(leaf)
  ]


def collect_changed_arguments(
  names: list[str], leaves: list[Any], leaves_after_call: list[Any]
) -> list[tuple[_scale_dependence.Output, Any]]:
  """Return the float arrays that a function changed in its arguments.

  Flax NNX changes models and optimizers in place: their arrays are other
  objects after the call. A Ref is the same object, and always included.
  """
  new_arrays = [
    (name, new)
    for name, old, new in zip(names, leaves, leaves_after_call, strict=True)
    if new is not old and _is_float_array(new)
  ]
  ref_arrays = [
    (name, ref[...])
    for name, ref in zip(names, leaves, strict=True)
    if _avals.is_ref_object(ref) and _is_float_array(ref)
  ]
  return [
    (_scale_dependence.Output("argument", name, 0), array)
    for name, array in new_arrays + ref_arrays
  ]


def collect_scale_states(
  result: Any, call_trees: list[Any], call_leaves: list[Any]
) -> list[tuple[_scale_dependence.Output, Any]]:
  """Return fields of each loss-scale state that a function returns or changes.

  Args:
    result: the result of the function.
    call_trees: its arguments, after the call.
    call_leaves: the leaves of its arguments before the call.
  """
  is_changed = lambda state: (
    _avals.is_ref_object(state.loss_scale)
    or not any(state.loss_scale is leaf for leaf in call_leaves)
  )
  states = [
    *_state.find_loss_scale_states(result),
    *filter(is_changed, _state.find_loss_scale_states(call_trees)),
  ]
  fields = (
    ("state_scale", "loss_scale"),
    ("state_skip_count", "total_notfinite"),
  )
  # A tree of shardings may have the structure of a state.
  states = [x for x in states if _arrays.is_array_like(x.loss_scale)]
  return [
    (
      _scale_dependence.Output(kind, field, i),
      jnp.asarray(_avals.read_ref(getattr(state, field))),
    )
    for i, state in enumerate(states)
    for kind, field in fields
  ]


def get_capture_fn(
  check_results: bool, name: str
) -> Callable[[Any], Any] | None:
  """Return how to capture a value with this tag; None if it is not needed."""
  tag = _tags.parse_tag(name)
  if tag is None or tag.kind in ("scale", "fixed_update_scale"):
    return None
  if tag.kind in _UPDATE_KINDS and not check_results:
    return None
  capture_fns = {
    "applied": lambda x: x.astype(jnp.int8),
    "loss": _nonfinite_indicator,
    "unscaled": _nonfinite_indicator,
  }
  return capture_fns.get(tag.kind, _harvest.UNCHANGED)


def is_optional_tag(name: str) -> bool:
  """Return whether a report needs no value with this tag to be complete."""
  tag = _tags.parse_tag(name)
  return tag is not None and tag.kind in _OPTIONAL_KINDS


def as_outputs(
  tagged_values: list[_harvest.TaggedValue],
) -> list[_scale_dependence.Output]:
  """Return outputs for tagged values, with the number of their ``update``.

  If there are several updates, names begin with this number: ``[0]/``.
  """
  current_groups: dict[str, int] = {}
  last_index: dict[str, int] = {}
  outputs = []
  for name, branches in tagged_values:
    tag = _tags.parse_tag(name)
    assert tag is not None  # Values with other tags are not captured.
    kind = tag.kind.removeprefix("scaled_")
    # The leaves of an update are in ascending order, so a lower index begins
    # another update.
    if tag.leaf_index <= last_index.get(kind, tag.leaf_index):
      current_groups[kind] = current_groups.get(kind, -1) + 1
    last_index[kind] = tag.leaf_index
    outputs.append(
      _scale_dependence.Output(kind, tag.path, current_groups[kind], branches)
    )
  return [
    out._replace(name=f"[{out.group}]/{out.name}")
    if current_groups[out.kind]
    else out
    for out in outputs
  ]


def distinguish_metrics(
  jaxpr: core.Jaxpr, outputs: list[_scale_dependence.Output]
) -> list[_scale_dependence.Output]:
  """Return the outputs of a jaxpr, with the kind ``"metric"`` of some results.

  A metric may be infinite in a sound step. An array that has the type of an
  argument may be its next value instead, such as batch statistics, unless the
  results of `update` are the next values of all arguments of this type.
  """
  get_type = lambda var: (
    _eqns.get_shape(var),
    getattr(var.aval, "dtype", None),
  )
  is_new = lambda output: output.depends_on_update or output.new_scales
  pairs = list(zip(outputs, jaxpr.outvars, strict=True))
  num_others = collections.Counter(map(get_type, jaxpr.invars))
  num_others.subtract(
    get_type(var)
    for output, var in pairs
    if output.kind in _scale_dependence.RETURNED_KINDS and is_new(output)
  )
  is_metric = lambda output, var: (
    output.kind == "result"
    and not is_new(output)
    and (_eqns.get_shape(var) == () or num_others[get_type(var)] <= 0)
  )
  return [
    output._replace(kind="metric") if is_metric(output, var) else output
    for output, var in pairs
  ]


def _is_float_array(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


def _nonfinite_indicator(x: jax.Array) -> jax.Array:
  """Return a scalar that is finite if and only if an array is.

  It is zero for a finite array, so it stays finite if many of them are added.
  """
  nonfinite_part = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(nonfinite_part).astype(jnp.float32)
