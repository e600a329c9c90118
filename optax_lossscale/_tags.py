"""Marks what a step is judged by, so that reports find it wherever it is.

A mark is an identity that has a name: a jaxpr shows it, and XLA drops it. What
is not traced is not marked.
"""

from collections.abc import Iterable
import itertools
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale import _grads, _paths

# "scale": the loss scale, where it multiplies a loss or divides gradients.
# "unscaled": gradients that were divided by the loss scale.
# "update_scale": the loss scale of an `update`, ahead of its gradients.
# "fixed_update_scale": the same, if the policy never changes the loss scale.
# "grads": true gradients that an `update` receives.
# "scaled_grads": the same, of a loss that is still scaled.
# "updates": the updates of the inner optimizer, with `check_updates`.
# "applied": whether the step is applied.
TagKind = Literal[
  "scale",
  "unscaled",
  "update_scale",
  "fixed_update_scale",
  "grads",
  "scaled_grads",
  "updates",
  "applied",
]

_PREFIX = "optax_lossscale|"


class Tag(NamedTuple):
  """What a mark tells.

  Attributes:
    kind: what is marked.
    leaf_index: which leaf of its tree it is; 0 for the first.
    path: its path in the tree, such as ``blocks/0``.
  """

  kind: str
  leaf_index: int
  path: str


def tag_tree(kind: TagKind, tree: Any) -> Any:
  """The same tree, in which each gradient is marked."""
  leaf_counter = itertools.count()
  leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  names = _paths.leaf_names(path for path, _ in leaves)
  tagged_leaves = [
    _tag_if_traced(Tag(kind, next(leaf_counter), name), leaf)
    if _grads.is_grad(path, leaf)
    else leaf
    for name, (path, leaf) in zip(names, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, tagged_leaves)


def tag_list(kind: TagKind, grads: Iterable[Any]) -> list[Any]:
  """The same gradients, each of them marked."""
  return [
    _tag_if_traced(Tag(kind, i, ""), grad) for i, grad in enumerate(grads)
  ]


def tag_value(kind: TagKind, value: jax.Array) -> jax.Array:
  """The same value, marked."""
  return _tag_if_traced(Tag(kind, 0, ""), value)


def tag_scale(
  kind: TagKind, scale: jax.Array, operands: Iterable[Any]
) -> jax.Array:
  """Tags a loss scale if an operand that it is used with is traced.

  The scale itself may be a constant of the program.
  """
  if any(isinstance(leaf, jax.core.Tracer) for leaf in operands):
    scale = checkpoint_name(scale, f"{_PREFIX}{kind}|0|")
  return scale


def parse_tag(name: str) -> Tag | None:
  """The mark that has a name; None if it is a name of somebody else."""
  if not name.startswith(_PREFIX):
    return None
  kind, leaf_index, path = name.removeprefix(_PREFIX).split("|", 2)
  return Tag(kind, int(leaf_index), path)


def _tag_if_traced(tag: Tag, leaf: Any) -> Any:
  if not isinstance(leaf, jax.core.Tracer):
    return leaf
  return checkpoint_name(
    leaf, f"{_PREFIX}{tag.kind}|{tag.leaf_index}|{tag.path}"
  )
