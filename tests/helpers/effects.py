"""Effects that a report must not repeat."""

import jax
from jax.experimental import io_callback
import numpy as np

from optax_lossscale._jaxprs import _primitives


def pass_through_host(tree):
  """Return the arrays of a tree, which a callback to the host returns."""
  types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  to_numpy = lambda tree: jax.tree.map(np.asarray, tree)
  # Within a shard_map, the results of a callback have the type of replicated
  # arrays.
  return jax.tree.map(
    lambda x, old: _primitives.cast_to_varying(
      x,
      tuple(
        _primitives.get_varying_axes(old) - _primitives.get_varying_axes(x)
      ),
    ),
    io_callback(to_numpy, types, tree),
    tree,
  )
