"""The values that become outputs of a traced function.

They are the float results, the arrays that the function changes in its
arguments, and values with a tag, such as the gradients that ``update`` receives
(see ``_tags``).
"""

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

from jax.extend import core

from optax_lossscale._jaxprs import (
  _entry_flow,
  _eqns,
  _regions,
)

# The kinds of outputs that are results of the traced function.
RETURNED_KINDS = ("result", "argument")


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


class TagGroup(NamedTuple):
  """The kind of a tag, and the number of the call that made it."""

  kind: str
  group: int


def describe_outputs(
  closed_jaxpr: _eqns.ClosedJaxpr,
  outputs: Sequence[Output],
  input_names: Sequence[str],
  regions: _regions.Regions,
  tags: Mapping[_regions.Key, TagGroup],
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

  The arguments have the shape and the dtype of the result, and reach it entry
  by entry. If none does, the arguments with the same last key are candidates. A
  candidate is better if its path shares more of its last keys with the path of
  the result.

  Args:
    jaxpr: the program.
    input_names: the names of its inputs.
    flow: the sources of its results.
  """
  types = list(map(_get_type, jaxpr.invars))
  paths = list(map(split_name, input_names))
  # Each result looks at a few inputs only, since there may be thousands.
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
