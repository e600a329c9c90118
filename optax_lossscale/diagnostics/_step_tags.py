"""The tags of a step, and the outputs that their values become.

The calls of this package tag their values (see ``_tags``); a report numbers the
calls. A step without ``with_loss_scaling`` has no tags, so gradients that leave
its backward pass are tagged as what its optimizer receives. If it has the
wrapper, but differentiates by other means than ``value_and_grad``, they are
tagged as gradients in front of ``update``.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _tags
from optax_lossscale._jaxprs import (
  _backward_pass,
  _entry_flow,
  _eqns,
  _regions,
  _tagged_values,
  _walk,
)
from optax_lossscale.diagnostics import _outputs

# The tags that a call of ``update`` does not make.
_LOSS_KINDS = {"scale", "loss", "unscaled", "backward"}
# The tags without whose values a report is not complete.
_REQUIRED_KINDS = {"grads", "scaled_grads", "applied", "updates"}
_GRADIENT_KINDS = {"grads", "scaled_grads", "unscaled", "backward"}
# The name of a value that leaves a backward pass, but reaches no optimizer.
_NO_TAG = "gradient"


class TaggedStep(NamedTuple):
  """A program with tags on its gradients.

  Attributes:
    closed_jaxpr: the program.
    flow: the sources of its results.
    has_update: whether it calls the `update` of `with_loss_scaling`.
    lowest_scale: the lowest loss scale that all policies allow; None if it is
      unknown.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  flow: _entry_flow.EntryFlow
  has_update: bool
  lowest_scale: float | None


def number_calls(closed_jaxpr: _eqns.ClosedJaxpr) -> _eqns.ClosedJaxpr:
  """Write the number of the call into each tag of a program.

  All tags of a call of `update` have the same number.
  """
  # The tags of each call, by the function that makes them.
  calls_by_source: dict[str, list[set[tuple[str, int]]]] = {}

  def rename(name: str) -> str:
    tag = _tags.parse_tag(name)
    if tag is None:
      return name
    source = tag.kind if tag.kind in _LOSS_KINDS else "update"
    calls = calls_by_source.setdefault(source, [set()])
    key = tag.kind, tag.leaf_index
    # Each value of a call has one tag, and the scale of an `update` the first.
    begins = key in calls[-1] or tag.kind.endswith("update_scale")
    if begins and calls[-1]:
      calls.append(set())
    calls[-1].add(key)
    return _tags.format_tag(tag._replace(call=len(calls) - 1))

  return _tagged_values.rename_tags(closed_jaxpr, rename)


def tag_gradients(
  closed_jaxpr: _eqns.ClosedJaxpr, input_names: Sequence[str]
) -> TaggedStep:
  """Tag the gradients of a program, unless calls of this package do.

  A function that is not a training step is not changed: it returns gradients,
  for example, and its results are compared.

  Args:
    closed_jaxpr: the program; its tags have the numbers of their calls.
    input_names: the names of its inputs.
  """
  tags = _list_tags(closed_jaxpr).values()
  kinds = {tag.kind for tag in tags}
  has_update = not kinds.isdisjoint({"grads", "scaled_grads"})
  tagged = closed_jaxpr
  if "unscaled" not in kinds:
    kind: _tags.TagKind = "backward" if has_update else "grads"
    tagged = _backward_pass.tag_gradients(
      closed_jaxpr,
      lambda call, i: _tags.format_tag(_tags.Tag(kind, i, "", call)),
    )
  flow = _entry_flow.EntryFlow(tagged, _is_gradient)
  if not has_update:
    new_tags = _list_new_tags(tagged, flow, input_names)
    rename = lambda name: (
      new_tags.get(name, _NO_TAG) if _is_gradient(name) else name
    )
    tagged = (
      _tagged_values.rename_tags(tagged, rename) if new_tags else closed_jaxpr
    )
  return TaggedStep(tagged, flow, has_update, _find_lowest_scale(tags))


def _find_lowest_scale(tags: Iterable[_tags.Tag]) -> float | None:
  """Return the lowest loss scale that the policies of all updates allow."""
  lowest_scales = []
  for tag in tags:
    if "update_scale" in tag.kind and tag.path:
      with contextlib.suppress(ValueError):  # The lowest scale is unknown.
        lowest_scales.append(float(tag.path))
  return max(lowest_scales, default=None)


def _list_tags(closed_jaxpr: _eqns.ClosedJaxpr) -> dict[str, _tags.Tag]:
  """Return the tags of a program by their names."""
  names = (
    _tagged_values.get_tag(visit.eqn) or ""
    for visit in _walk.walk(closed_jaxpr, _eqns.subjaxprs)
  )
  return {name: tag for name in names if (tag := _tags.parse_tag(name))}


def _is_gradient(name: str) -> bool:
  tag = _tags.parse_tag(name)
  return tag is not None and tag.kind in _GRADIENT_KINDS


def _list_new_tags(
  closed_jaxpr: _eqns.ClosedJaxpr,
  flow: _entry_flow.EntryFlow,
  input_names: Sequence[str],
) -> dict[str, str]:
  """Return the tag of each gradient that an optimizer receives.

  Gradients that reach no result by entries are left out, such as those of the
  first pass of a sharpness-aware step, unless there are no others.

  Returns:
    The tags by the old ones; empty if no result that depends on gradients is
    the next value of an argument.
  """
  arguments_by_tag: dict[Any, set[int]] = {}
  for i, labels in enumerate(flow.labels):
    for label in labels:
      arguments_by_tag.setdefault(label, set()).update(flow.list_arguments(i))
  if not arguments_by_tag.get(_entry_flow.AFTER_GRADIENT):
    return {}
  tags = {
    name: tag
    for name, tag in _list_tags(closed_jaxpr).items()
    if tag.kind in _GRADIENT_KINDS
  }
  calls = {tag.call for name, tag in tags.items() if arguments_by_tag.get(name)}
  shapes = list(map(_eqns.get_shape, closed_jaxpr.jaxpr.invars))
  input_paths = list(map(_outputs.split_name, input_names))
  num_uses = collections.Counter[tuple[int, str]]()
  new_tags = {}
  for name, tag in tags.items():
    if calls and tag.call not in calls:
      continue
    sources = sorted(arguments_by_tag.get(name, ()))
    path = (
      _find_path(sources, flow.in_loss, shapes, input_paths)
      or f"gradient {tag.leaf_index}"
    )
    num_uses[tag.call, path] += 1
    if num_uses[tag.call, path] > 1:
      path += f" #{num_uses[tag.call, path]}"
    new_tags[name] = _tags.format_tag(tag._replace(kind="grads", path=path))
  return new_tags


def _find_path(
  arguments: Sequence[int],
  in_loss: set[int],
  shapes: Sequence[tuple[int, ...]],
  input_paths: Sequence[tuple[str, ...]],
) -> str:
  """Return the path of a parameter, from those of it and of its moments.

  Args:
    arguments: the inputs from which the same results are computed by entries
      as from the gradient.
    in_loss: the inputs on which the loss depends.
    shapes: the shapes of all inputs.
    input_paths: their paths.
  """
  if not arguments:
    return ""
  paths = [input_paths[i] for i in arguments]
  if in_loss.isdisjoint(arguments):  # These are moments, as of Muon.
    params = [
      input_paths[i]
      for i in sorted(in_loss)
      if shapes[i] == shapes[arguments[0]]
    ]
    get_length = lambda path: len(_outputs.find_common_end([paths[0], path]))
    paths += sorted(params, key=get_length)[-1:]
  common_path = _outputs.find_common_end(paths)
  # The first key of a parameter without moments is the name of the argument.
  shortest = min(paths, key=len)
  has_moments = len(paths) > 1 and common_path
  return "/".join(common_path if has_moments else shortest[1:] or shortest)


def harvest_outputs(
  closed_jaxpr: _eqns.ClosedJaxpr,
) -> tuple[_tagged_values.HarvestedJaxpr, list[_outputs.Output]]:
  """Return the values that the tags of a program mark.

  If there are several calls of ``update``, names begin with the number of
  theirs: ``[0]/``.

  Returns:
    The program with further outputs, and their description.
  """
  harvest = _tagged_values.harvest_tagged_values(
    closed_jaxpr, _get_capture_fn, _is_optional
  )
  outputs = [
    _outputs.Output(
      "unscaled" if tag.kind == "backward" else _get_group(tag).kind,
      tag.path,
      tag.call,
      tag.kind,
    )
    for tag in map(_tags.parse_tag, harvest.tags)
    if tag is not None  # Values with other tags are not captured.
  ]
  groups = {(out.kind, out.group) for out in outputs}
  num_calls = collections.Counter(kind for kind, _ in groups)
  return harvest, [
    out._replace(name=f"[{out.group}]/{out.name}")
    if num_calls[out.kind] > 1
    else out
    for out in outputs
  ]


def _get_capture_fn(name: str) -> Callable[[Any], Any] | None:
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


def _is_optional(name: str) -> bool:
  """Return whether a report needs no value with this tag to be complete."""
  tag = _tags.parse_tag(name)
  return tag is not None and tag.kind not in _REQUIRED_KINDS


def _nonfinite_indicator(x: jax.Array) -> jax.Array:
  """Return a scalar that is finite if and only if an array is.

  It is zero for a finite array, so it stays finite if many of them are added.
  """
  nonfinite_part = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(nonfinite_part).astype(jnp.float32)


def list_tags(
  regions: _regions.Regions,
) -> dict[_regions.Key, _outputs.TagGroup]:
  """Return the tags of a program by position."""
  tags = {
    key: _tags.parse_tag(_tagged_values.get_tag(visit.eqn) or "")
    for key, visit in regions.visits.items()
  }
  return {key: _get_group(tag) for key, tag in tags.items() if tag is not None}


def _get_group(tag: _tags.Tag) -> _outputs.TagGroup:
  kind = tag.kind.removeprefix("scaled_").removeprefix("fixed_")
  return _outputs.TagGroup(kind, tag.call)
