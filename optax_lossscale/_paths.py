"""The names of the leaves of a pytree, by the keys on the way to each."""

from typing import Any

import jax


def key_name(key: Any) -> Any:
  """What one key of a path says: a name, a key of a dict, or an index."""
  return getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))


def leaf_name(path: Any) -> str:
  """The name of a leaf, such as ``layers/0/weight``; empty of a lone array."""
  # Flax NNX keeps each array as the value of a variable.
  if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")
