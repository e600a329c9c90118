"""Names of pytree leaves, such as ``layers/0/weight``, from their key paths."""

from collections.abc import Iterable
from typing import Any

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
