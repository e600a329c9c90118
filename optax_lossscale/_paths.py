"""The names of the leaves of a pytree, by the keys on the way to each."""

from collections.abc import Iterable
from typing import Any

import jax


def key_name(key: Any) -> Any:
  """What one key of a path says: a name, a key of a dict, or an index."""
  return getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))


def leaf_names(paths: Iterable[Any]) -> list[str]:
  """The names of the leaves of one tree, such as ``layers/0/weight``.

  A key is spelled as it is, even if it holds a ``/``, as Haiku's do: the name
  ``mlp/~/linear_0/w`` is that of Haiku's own scope. If two leaves of the tree
  would then have the same name, each key with a ``/`` or a quote in it is
  quoted in all names of the tree, as in ``'a/b'/w``. So no two names are equal.
  """
  paths = list(map(tuple, paths))
  names = list(map(leaf_name, paths))
  if len(set(names)) == len(names):
    return names
  return ["/".join(map(_quote_key, _strip_value_key(path))) for path in paths]


def leaf_name(path: Any) -> str:
  """The name of a leaf, if no other leaf of its tree may have the same one.

  It is empty if the tree is a single array.
  """
  return jax.tree_util.keystr(
    _strip_value_key(path), simple=True, separator="/"
  )


def _strip_value_key(path: Any) -> Any:
  """The path without what Flax NNX adds, where each array is a value."""
  if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
    return path[:-1]
  return path


def _quote_key(key: Any) -> str:
  name = jax.tree_util.keystr((key,), simple=True)
  return repr(name) if set(name) & set("/'\"") else name
