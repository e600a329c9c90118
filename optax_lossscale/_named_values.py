"""Marks what a step is judged by, so that reports find it wherever it is.

A mark is an identity that has a name: a jaxpr shows it, and XLA drops it. What
is not traced is not marked.
"""

from collections.abc import Iterable
import itertools
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale import _grads

# The loss scale, where it multiplies a loss or divides gradients; the gradients
# that were divided; the gradients that an optimizer is given, true ones or such
# of a scaled loss; the updates that it makes, if these are tested, too; and
# whether they are applied.
Kind = Literal[
  "scale", "unscaled", "grads", "scaled_grads", "updates", "applied"
]

_PREFIX = "optax_lossscale|"


class Mark(NamedTuple):
  """What a mark tells.

  Attributes:
    kind: what is marked.
    number: which leaf of its tree it is; 0 for the first.
    path: the way to it, such as ``['blocks'][0]``.
  """

  kind: str
  number: int
  path: str


def marked_tree(kind: Kind, tree: Any) -> Any:
  """The same tree, in which each gradient is marked."""
  numbers = itertools.count()

  def mark(path: Any, leaf: Any) -> Any:
    if not _grads.is_grad(path, leaf):
      return leaf
    return _marked(Mark(kind, next(numbers), jax.tree_util.keystr(path)), leaf)

  return jax.tree_util.tree_map_with_path(mark, tree)


def marked_list(kind: Kind, grads: Iterable[Any]) -> list[Any]:
  """The same gradients, each of them marked."""
  return [_marked(Mark(kind, i, ""), grad) for i, grad in enumerate(grads)]


def marked(kind: Kind, value: jax.Array) -> jax.Array:
  """The same value, marked."""
  return _marked(Mark(kind, 0, ""), value)


def marked_scale(scale: jax.Array, beside: Iterable[Any]) -> jax.Array:
  """The same scale, marked if what it is used for is traced."""
  if any(isinstance(leaf, jax.core.Tracer) for leaf in beside):
    scale = checkpoint_name(scale, f"{_PREFIX}scale|0|")
  return scale


def mark_of(name: str) -> Mark | None:
  """The mark that has a name; None if it is a name of somebody else."""
  if not name.startswith(_PREFIX):
    return None
  kind, number, path = name.removeprefix(_PREFIX).split("|", 2)
  return Mark(kind, int(number), path)


def _marked(mark: Mark, leaf: Any) -> Any:
  if not isinstance(leaf, jax.core.Tracer):
    return leaf
  return checkpoint_name(
    leaf, f"{_PREFIX}{mark.kind}|{mark.number}|{mark.path}"
  )
