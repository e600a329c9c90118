"""Tag the gradients and the loss scale of a step, so reports can find them.

A tag is a ``jax.ad_checkpoint.checkpoint_name``: a named identity operation
that is visible in the jaxpr and that XLA removes. Values outside a trace are
not tagged.
"""

from collections.abc import Iterable
import itertools
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale import _grads, _trees

# "scale": the loss scale, where it multiplies a loss or divides gradients.
# "unscaled": gradients that were divided by the loss scale.
# "backward": gradients where they leave the backward pass, if no call of this
# package computes them. Only a report adds these.
# "update_scale": the loss scale of an `update`, before its gradients.
# "fixed_update_scale": the same, if the policy never changes the loss scale.
# "grads": unscaled gradients that an `update` receives.
# "scaled_grads": the same, with `grads_are_scaled=True`.
# "updates": the updates of the inner optimizer, with `check_updates`.
# "applied": whether the step is applied.
# "loss": the loss that was differentiated, unscaled.
# "new_updates": the updates of the inner optimizer, before they are cast to the
# dtypes of the parameters.
# "masked_updates": the updates that an `update` returns.
# "new_scale": the loss scale that an `update` returns.
# "new_skip_count": the `total_notfinite` that an `update` returns.
TagKind = Literal[
  "scale",
  "unscaled",
  "backward",
  "update_scale",
  "fixed_update_scale",
  "grads",
  "scaled_grads",
  "updates",
  "applied",
  "loss",
  "new_updates",
  "masked_updates",
  "new_scale",
  "new_skip_count",
]

_PREFIX = "optax_lossscale|"


class Tag(NamedTuple):
  """The contents of a tag's name.

  Attributes:
    kind: the `TagKind` of the value.
    leaf_index: the index of the leaf in its tree; 0 for the first.
    path: the path of the leaf in the tree, such as ``blocks/0``. For the scale
      of an `update`, the lowest scale of its policy; empty if unknown.
    call: the number of the call of `update` or of `value_and_grad` among those
      of the program. Only a report knows it (see ``diagnostics/_outputs``).
  """

  kind: str
  leaf_index: int
  path: str
  call: int = 0


def tag_tree(kind: TagKind, tree: Any) -> Any:
  """Tag each gradient in a tree with its index and path."""
  leaf_counter = itertools.count()
  leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  names = _trees.leaf_names(path for path, _ in leaves)
  tagged_leaves = [
    _tag_if_traced(Tag(kind, next(leaf_counter), name), leaf)
    if _grads.is_grad(path, leaf)
    else leaf
    for name, (path, leaf) in zip(names, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, tagged_leaves)


def tag_list(kind: TagKind, grads: Iterable[Any]) -> list[Any]:
  """Tag each gradient in a list with its index."""
  return [
    _tag_if_traced(Tag(kind, i, ""), grad) for i, grad in enumerate(grads)
  ]


def tag_value(kind: TagKind, value: jax.Array) -> jax.Array:
  """Tag a single value."""
  return _tag_if_traced(Tag(kind, 0, ""), value)


def tag_scale(
  kind: TagKind, scale: jax.Array, operands: Iterable[Any], path: str = ""
) -> jax.Array:
  """Tag a loss scale if one of the operands that it scales is traced.

  The scale itself may be a constant of the program, which is not traced.
  """
  if any(isinstance(leaf, jax.core.Tracer) for leaf in operands):
    scale = checkpoint_name(scale, format_tag(Tag(kind, 0, path)))
  return scale


def format_tag(tag: Tag) -> str:
  """Return the name of a value with this tag."""
  return f"{_PREFIX}{tag.kind}|{tag.call}|{tag.leaf_index}|{tag.path}"


def parse_tag(name: str) -> Tag | None:
  """Parse the name of a tag; return None for names that are not tags."""
  if not name.startswith(_PREFIX):
    return None
  kind, call, leaf_index, path = name.removeprefix(_PREFIX).split("|", 3)
  return Tag(kind, int(leaf_index), path, int(call))


def _tag_if_traced(tag: Tag, leaf: Any) -> Any:
  if not isinstance(leaf, jax.core.Tracer):
    return leaf
  return checkpoint_name(leaf, format_tag(tag))
