"""The values that become outputs of a traced function.

They are the float results, the arrays that the function changes in its
arguments, and values with a tag, such as the gradients that ``update`` receives
(see ``_tags``).
"""

import collections
from collections.abc import (
  Callable,
  Iterable,
  Mapping,
  Sequence,
)
import itertools
import re
import types
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _arrays, _paths, _state, _tags
from optax_lossscale._jaxprs import (
  _entry_flow,
  _eqns,
  _regions,
  _tagged_values,
)

# The kinds of outputs that are results of the traced function.
RETURNED_KINDS = ("result", "argument")
# The tags that show what becomes of the results of ``update``.
_UPDATE_KINDS = {"new_updates", "new_scale", "new_skip_count"}
# The tags that a call of ``update`` makes.
_KINDS_OF_UPDATE = {
  *_UPDATE_KINDS, "update_scale", "fixed_update_scale", "grads", "scaled_grads",
  "applied", "updates", "masked_updates",
}  # fmt: skip
# The tags whose values are left out if they cannot become outputs.
_OPTIONAL_KINDS = {
  *_UPDATE_KINDS, "update_scale", "fixed_update_scale", "loss", "unscaled",
  "backward",
}  # fmt: skip


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: ``"result"``; ``"integers"``, a result of an integer dtype, such as
      quantized parameters; ``"argument"``, if it was changed in place; or the
      kind of a tag:
      ``"grads"``, the gradients that `update` receives; ``"updates"``;
      ``"applied"``, which is 1 or 0, or -1 if `update` did not run;
      ``"unscaled"``, a number that is finite if and only if a gradient is that
      `value_and_grad` returns, or that leaves a backward pass; ``"loss"``, its
      loss; ``"logged"``, the same as ``"unscaled"``, for a gradient that no
      `update` receives; ``"update_scale"``, the loss scale of an `update`;
      ``"new_updates"``, ``"new_scale"`` and ``"new_skip_count"``, what `update`
      returns. ``"state_scale"`` and
      ``"state_skip_count"`` are fields of a loss-scale state among the results.
    name: its path, such as ``1/kernel``.
    group: the index of the tree that it is a leaf of, among the trees of its
      kind: the results of the function, or what the calls of ``update`` or of
      ``value_and_grad`` tagged.
    tag_kind: the kind of its tag; empty without a tag.
    depends_on_gradients: whether it is a result that may depend on gradients.
    new_updates: the indices of the updates that may reach it.
    new_scales: the indices of the updates whose new loss scales may reach it.
    candidates: the arguments that it may replace, by how well they match.
    is_metric: whether it is a result that replaces no argument, or a scalar,
      and depends on no gradient. It may be infinite in a sound step.
  """

  kind: str
  name: str
  group: int
  tag_kind: str = ""
  depends_on_gradients: bool = False
  new_updates: frozenset[int] = frozenset()
  new_scales: frozenset[int] = frozenset()
  candidates: Mapping[Any, Sequence[int]] = types.MappingProxyType({})
  is_metric: bool = False

  @property
  def is_state(self) -> bool:
    """Whether it is a float result that may be a parameter or other state.

    The loss-scale state is none.
    """
    is_result = self.kind in RETURNED_KINDS and not self.is_metric
    return is_result and not self.in_scale_state

  @property
  def in_scale_state(self) -> bool:
    """Whether it is part of a loss-scale state."""
    keys = {"loss_scale_state", "loss_scale", "policy_state"}
    return not keys.isdisjoint(split_name(self.name))


def collect_float_results(
  out: Any,
) -> list[tuple[Output, Any]]:
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
    (Output("result" if _is_float_array(leaf) else "integers", name, i), leaf)
    for name, (i, _, leaf) in zip(names, leaves, strict=True)
    if _is_float_array(leaf) or _is_integer_array(leaf)
  ]


def collect_changed_arguments(
  names: list[str], leaves: list[Any], leaves_after_call: list[Any]
) -> list[tuple[Output, Any]]:
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
    if _eqns.is_ref_object(ref) and _is_float_array(ref)
  ]
  return [
    (Output("argument", name, 0), array)
    for name, array in new_arrays + ref_arrays
  ]


def collect_scale_states(
  result: Any, call_trees: list[Any], call_leaves: list[Any]
) -> list[tuple[Output, Any]]:
  """Return fields of each loss-scale state that a function returns or changes.

  Args:
    result: the result of the function.
    call_trees: its arguments, after the call.
    call_leaves: the leaves of its arguments before the call.
  """
  is_changed = lambda state: (
    _eqns.is_ref_object(state.loss_scale)
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
      Output(kind, field, i),
      jnp.asarray(_eqns.read_ref(getattr(state, field))),
    )
    for i, state in enumerate(states)
    for kind, field in fields
  ]


def get_capture_fn(name: str) -> Callable[[Any], Any] | None:
  """Return how to capture a value with this tag; None if it is not needed."""
  tag = _tags.parse_tag(name)
  if tag is None or tag.kind in ("scale", "masked_updates"):
    return None
  capture_fns = {
    "applied": lambda x: x.astype(jnp.int8),
    "unscaled": _nonfinite_indicator,
    "backward": _nonfinite_indicator,
  }
  return capture_fns.get(tag.kind, _tagged_values.UNCHANGED)


def is_optional_tag(name: str) -> bool:
  """Return whether a report needs no value with this tag to be complete."""
  tag = _tags.parse_tag(name)
  return tag is not None and tag.kind in _OPTIONAL_KINDS


def as_outputs(tag_names: list[str]) -> list[Output]:
  """Return outputs for tagged values.

  If there are several calls of ``update``, names begin with the number of
  theirs: ``[0]/``.
  """
  outputs = []
  for name in tag_names:
    tag = _tags.parse_tag(name)
    assert tag is not None  # Values with other tags are not captured.
    kind, call = _get_group(tag)
    kind = "unscaled" if kind == "backward" else kind
    outputs.append(Output(kind, tag.path, call, tag.kind))
  groups = {TagGroup(out.kind, out.group) for out in outputs}
  num_calls = collections.Counter(kind for kind, _ in groups)
  return [
    out._replace(name=f"[{out.group}]/{out.name}")
    if num_calls[out.kind] > 1
    else out
    for out in outputs
  ]


def describe_outputs(
  closed_jaxpr: _eqns.ClosedJaxpr,
  outputs: Sequence[Output],
  input_names: Sequence[str],
  regions: _regions.Regions,
  tags: "Mapping[_regions.Key, TagGroup]",
  flow: _entry_flow.EntryFlow,
) -> list[Output]:
  """Return outputs with what they depend on, and what they may replace.

  Args:
    closed_jaxpr: the program.
    outputs: its outputs.
    input_names: the names of its inputs.
    regions: its regions.
    tags: its tags.
    flow: the sources of its results, which are the first outputs.
  """
  keys_by_tag: dict[TagGroup, list[_regions.Key]] = {}
  for key, tag in tags.items():
    if tag.kind in ("new_updates", "new_scale", "unscaled", "backward"):
      keys_by_tag.setdefault(tag, []).append(key)
  outputs_by_tag = {
    tag: regions.find_outputs(keys) for tag, keys in keys_by_tag.items()
  }
  list_groups = lambda kind, i: frozenset(
    tag.group
    for tag, indices in outputs_by_tag.items()
    if tag.kind == kind and i in indices
  )
  grad_indices = {i for i, x in enumerate(outputs) if x.kind == "grads"}
  find_candidates = _make_candidate_search(
    closed_jaxpr.jaxpr, input_names, flow
  )

  def describe(i: int, output: Output) -> Output:
    if output.kind == "unscaled":
      tag = TagGroup(output.tag_kind, output.group)
      received = grad_indices & outputs_by_tag.get(tag, grad_indices)
      is_logged = bool(grad_indices) and not received
      return output._replace(kind="logged") if is_logged else output
    output = output._replace(
      new_updates=list_groups("new_updates", i),
      new_scales=list_groups("new_scale", i),
    )
    if output.kind not in RETURNED_KINDS:
      return output
    # The flow follows integers, too, which may hold the bits of parameters.
    depends_on_gradients = _entry_flow.AFTER_GRADIENT in flow.labels[i]
    candidates = {} if output.in_scale_state else find_candidates(i, output)
    is_metric = (
      output.kind == "result"
      and not (depends_on_gradients or output.new_scales)
      and not (candidates and _eqns.get_shape(closed_jaxpr.jaxpr.outvars[i]))
    )
    return output._replace(
      depends_on_gradients=depends_on_gradients,
      candidates=candidates,
      is_metric=is_metric,
    )

  return list(itertools.starmap(describe, enumerate(outputs)))


def _make_candidate_search(
  jaxpr: core.Jaxpr, input_names: Sequence[str], flow: _entry_flow.EntryFlow
) -> Callable[[int, Output], dict[Any, list[int]]]:
  """Return a function that finds the arguments that a result may replace.

  They have the shape and the dtype of the result. The result is computed from
  them by entries; or else they have the same last key. Of several, the longest
  common end of the paths decides.

  Args:
    jaxpr: the program.
    input_names: the names of its inputs.
    flow: the sources of its results.
  """
  types = list(map(_get_type, jaxpr.invars))
  paths = list(map(split_name, input_names))
  inputs_by_key: dict[Any, list[int]] = {}
  for k, path in enumerate(paths):
    inputs_by_key.setdefault((types[k], path[-1:]), []).append(k)

  def find_candidates(i: int, output: Output) -> dict[Any, list[int]]:
    array_type, path = _get_type(jaxpr.outvars[i]), split_name(output.name)
    arguments = [k for k in flow.list_arguments(i) if types[k] == array_type]
    by_flow = bool(arguments)
    if not by_flow:
      arguments = inputs_by_key.get((array_type, path[-1:]), [])
    candidates: dict[Any, list[int]] = {}
    for k in arguments:
      length = len(find_common_end([path, paths[k]]))
      candidates.setdefault((by_flow, length), []).append(k)
    return candidates

  return find_candidates


class TagGroup(NamedTuple):
  """The kind of a tag, and the number of the call that made it."""

  kind: str
  group: int


def list_tags(regions: _regions.Regions) -> dict[_regions.Key, TagGroup]:
  """Return the tags of a program by position."""
  tags = {
    key: _tags.parse_tag(_tagged_values.get_tag(eqn) or "")
    for key, eqn in regions.eqns.items()
  }
  return {key: _get_group(tag) for key, tag in tags.items() if tag is not None}


def _get_group(tag: _tags.Tag) -> TagGroup:
  kind = tag.kind.removeprefix("scaled_").removeprefix("fixed_")
  return TagGroup(kind, tag.call)


def number_calls(closed_jaxpr: _eqns.ClosedJaxpr) -> _eqns.ClosedJaxpr:
  """Write the number of the call into each tag of a program.

  All tags of a call of `update` have the same number.
  """
  calls: dict[str, int] = {}
  seen: dict[str, set[tuple[str, int]]] = {}

  def rename(name: str) -> str:
    tag = _tags.parse_tag(name)
    if tag is None:
      return name
    source = "update" if tag.kind in _KINDS_OF_UPDATE else tag.kind
    seen_in_call = seen.setdefault(source, set())
    key = tag.kind, tag.leaf_index
    # Each value of a call has one tag, and the scale of an `update` the first.
    begins = key in seen_in_call or tag.kind.endswith("update_scale")
    if begins and seen_in_call:
      calls[source] = calls.get(source, 0) + 1
      seen_in_call.clear()
    seen_in_call.add(key)
    return _tags.format_tag(tag._replace(call=calls.get(source, 0)))

  return _tagged_values.rename_tags(closed_jaxpr, rename)


def split_name(name: str) -> tuple[str, ...]:
  """Return the keys of a path: ``params['a/b'].c`` has four."""
  keys = re.findall(r"[^\[\]'\"./]+", name)
  # Flax NNX adds this key to the path of an array.
  return tuple(keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys)


def find_common_end(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
  """Return the last keys that all of some paths share."""
  columns = zip(*map(reversed, paths), strict=False)
  is_shared = lambda keys: len(set(keys)) == 1
  end = [keys[0] for keys in itertools.takewhile(is_shared, columns)]
  return tuple(end[::-1])


def _get_type(var: Any) -> Any:
  return getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)


def _is_integer_array(leaf: Any) -> bool:
  is_array = _arrays.is_array_like(leaf) and hasattr(leaf, "dtype")
  return is_array and jnp.issubdtype(leaf.dtype, jnp.integer)


def _is_float_array(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


def _nonfinite_indicator(x: jax.Array) -> jax.Array:
  """Return a scalar that is finite if and only if an array is.

  It is zero for a finite array, so it stays finite if many of them are added.
  """
  nonfinite_part = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(nonfinite_part).astype(jnp.float32)
