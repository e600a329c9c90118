"""Flattens the arguments of a function, in which Flax NNX may share variables.

``jax.tree.flatten`` returns a variable that two layers share twice, and its
inverse makes two variables of it. So NNX objects are flattened as Flax does.
"""

from collections.abc import Callable, Sequence
import sys
from typing import Any, NamedTuple

import jax


class FlatTrees(NamedTuple):
  """Flattened pytrees.

  Attributes:
    leaves: the leaves of all trees. That of a shared variable is there once.
    names: the path to each, from the name of its tree, as a user would write
      it: ``params['w']`` or ``model.linear.kernel.value``.
    structure: what else the trees hold, to compare.
    unflatten: makes trees of as many leaves. NNX objects are new ones, and
      belong to the trace in which they are made.
  """

  leaves: list[Any]
  names: list[str]
  structure: Any
  unflatten: Callable[[Sequence[Any]], list[Any]]


def flatten(trees: Sequence[tuple[str, Any]]) -> FlatTrees:
  """Flattens pytrees, each of which has a name."""
  nnx: Any = sys.modules.get("flax.nnx")  # If not, there are no such objects.
  kinds = () if nnx is None else (nnx.Pytree, nnx.Module, nnx.Variable)
  is_object = lambda x: isinstance(x, kinds)
  paths, structure = jax.tree_util.tree_flatten_with_path(
    [tree for _, tree in trees], is_leaf=is_object
  )
  tops = [leaf for _, leaf in paths]
  top_names = [
    trees[path[0].idx][0] + jax.tree_util.keystr(path[1:]) for path, _ in paths
  ]
  objects = [i for i, leaf in enumerate(tops) if is_object(leaf)]
  if not objects:
    unflatten_all = lambda leaves: jax.tree.unflatten(structure, leaves)
    return FlatTrees(tops, top_names, structure, unflatten_all)
  graph, state = nnx.split(tuple(tops[i] for i in objects))
  state_paths, state_structure = jax.tree_util.tree_flatten_with_path(state)
  plain = [i for i, leaf in enumerate(tops) if not is_object(leaf)]
  state_names = [
    top_names[objects[path[0].key]] + "".join(map(_as_attribute, path[1:]))
    for path, _ in state_paths
  ]

  def unflatten(leaves: Sequence[Any]) -> list[Any]:
    filled = list(tops)
    for i, leaf in zip(plain, leaves, strict=False):
      filled[i] = leaf
    new_state = jax.tree.unflatten(state_structure, leaves[len(plain) :])
    for i, new in zip(objects, nnx.merge(graph, new_state), strict=True):
      filled[i] = new
    return jax.tree.unflatten(structure, filled)

  return FlatTrees(
    [*(tops[i] for i in plain), *(leaf for _, leaf in state_paths)],
    [*(top_names[i] for i in plain), *state_names],
    (structure, state_structure),
    unflatten,
  )


def _as_attribute(key: Any) -> str:
  """Returns how a user writes the path to an attribute of an NNX object."""
  name = getattr(key, "key", None)
  is_attribute = isinstance(name, str) and name.isidentifier()
  return f".{name}" if is_attribute else jax.tree_util.keystr((key,))
