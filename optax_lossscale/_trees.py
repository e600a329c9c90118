"""Names of the leaves of pytrees, and trees with Flax NNX modules in them.

``jax.tree.flatten`` returns a variable that two NNX layers share twice, and its
inverse makes two separate variables of it. So this module flattens NNX objects
by ``nnx.split``, which respects shared variables.
"""

from collections.abc import Callable, Iterable, Sequence
import sys
from typing import Any, NamedTuple

import jax


def key_name(key: Any) -> Any:
  """Return the name, dict key or index of one entry of a key path."""
  return getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))


def leaf_names(paths: Iterable[Any]) -> list[str]:
  """Return unique names for the leaves of one tree, as ``layers/0/weight``.

  A key with a ``/`` is not quoted, so the name of a Haiku parameter is its
  scope: ``mlp/~/linear_0/w``. If two leaves of the tree would then have the
  same name, each key that contains a ``/`` or a quote is quoted in all names of
  the tree, as in ``'a/b'/w``.

  Args:
    paths: the key path of each leaf.
  """
  paths = list(map(tuple, paths))
  names = list(map(leaf_name, paths))
  if len(set(names)) == len(names):
    return names
  # All names of the tree change, so a name doesn't depend on which other leaf
  # it would collide with.
  return ["/".join(map(_quote_key, _strip_value_key(path))) for path in paths]


def leaf_name(path: Any) -> str:
  """Return the name of a leaf, which another leaf of its tree may share.

  It is empty if the tree is a single array. Use :func:`leaf_names` where the
  names must be unique.
  """
  return jax.tree_util.keystr(
    _strip_value_key(path), simple=True, separator="/"
  )


def _strip_value_key(path: Any) -> Any:
  """Drop the last key ``value`` that Flax NNX adds to the path of an array."""
  if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
    return path[:-1]
  return path


def _quote_key(key: Any) -> str:
  """Format a key, quoted if it contains a ``/`` or a quote."""
  name = jax.tree_util.keystr((key,), simple=True)
  return repr(name) if set(name) & set("/'\"") else name


class FlatTrees(NamedTuple):
  """Flattened pytrees.

  Attributes:
    leaves: the leaves of all trees. A shared variable is one leaf.
    names: the path of each leaf as Python code, such as ``params['w']`` or
      ``model.linear.kernel.value``.
    structure: the static structure of all trees, which supports ``==``.
    unflatten: builds the trees from other leaves. NNX objects are created, and
      belong to the trace in which this is called.
  """

  leaves: list[Any]
  names: list[str]
  structure: Any
  unflatten: Callable[[Sequence[Any]], list[Any]]


def flatten_named_trees(trees: Sequence[tuple[str, Any]]) -> FlatTrees:
  """Flatten named pytrees.

  Args:
    trees: the name and the pytree of each argument.

  Returns:
    The flattened trees. The leaves outside of NNX objects come first.
  """
  # If the user hasn't imported NNX, no argument contains an NNX object.
  nnx: Any = sys.modules.get("flax.nnx")
  nnx_types = () if nnx is None else (nnx.Pytree, nnx.Module, nnx.Variable)
  is_nnx_object = lambda x: isinstance(x, nnx_types)
  leaves_with_path, structure = jax.tree_util.tree_flatten_with_path(
    [tree for _, tree in trees], is_leaf=is_nnx_object
  )
  top_leaves = [leaf for _, leaf in leaves_with_path]
  top_names = [
    trees[path[0].idx][0] + jax.tree_util.keystr(path[1:])
    for path, _ in leaves_with_path
  ]
  nnx_indices = [i for i, leaf in enumerate(top_leaves) if is_nnx_object(leaf)]
  if not nnx_indices:
    unflatten_all = lambda leaves: jax.tree.unflatten(structure, leaves)
    return FlatTrees(top_leaves, top_names, structure, unflatten_all)
  # All NNX objects are split in one call: a variable may be shared between the
  # arguments, such as a model and its optimizer.
  graphdef, state = nnx.split(tuple(top_leaves[i] for i in nnx_indices))
  state_leaves_with_path, state_structure = (
    jax.tree_util.tree_flatten_with_path(state)
  )
  plain_indices = [
    i for i, leaf in enumerate(top_leaves) if not is_nnx_object(leaf)
  ]
  state_names = [
    top_names[nnx_indices[path[0].key]]
    + "".join(map(_format_nnx_key, path[1:]))
    for path, _ in state_leaves_with_path
  ]

  def unflatten(leaves: Sequence[Any]) -> list[Any]:
    """Build the trees from leaves in the order of ``FlatTrees.leaves``."""
    new_leaves = list(top_leaves)
    for i, leaf in zip(plain_indices, leaves, strict=False):
      new_leaves[i] = leaf
    new_state = jax.tree.unflatten(
      state_structure, leaves[len(plain_indices) :]
    )
    for i, new_object in zip(
      nnx_indices, nnx.merge(graphdef, new_state), strict=True
    ):
      new_leaves[i] = new_object
    return jax.tree.unflatten(structure, new_leaves)

  return FlatTrees(
    [
      *(top_leaves[i] for i in plain_indices),
      *(leaf for _, leaf in state_leaves_with_path),
    ],
    [*(top_names[i] for i in plain_indices), *state_names],
    (structure, state_structure),
    unflatten,
  )


def _format_nnx_key(key: Any) -> str:
  """Format a key of the state of an NNX object as Python code."""
  name = getattr(key, "key", None)
  is_attribute = isinstance(name, str) and name.isidentifier()
  return f".{name}" if is_attribute else jax.tree_util.keystr((key,))
