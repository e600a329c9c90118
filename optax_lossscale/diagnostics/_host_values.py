"""Read small arrays to the host, with the same values in each process.

If several processes run a program, a process can only read the arrays that it
holds completely. All processes must decide by the same values, since they must
run the same programs in the same order.
"""

from typing import Any

import jax
from jax.experimental import multihost_utils

from optax_lossscale import _arrays


def to_host(tree: Any) -> Any:
  """Return a tree of arrays as NumPy arrays, gathered from all processes.

  Flags of an ``update`` under ``shard_map`` or ``vmap``, for example, are
  sharded over the devices. Replicated arrays are read without communication.
  All processes must call this function.

  Args:
    tree: a pytree of arrays. Each should be small, since each process holds all
      of it.
  """
  return jax.device_get(jax.tree.map(_gather, tree))


def _gather(x: Any) -> Any:
  if _arrays.is_addressable(x):
    return x
  return multihost_utils.process_allgather(x, tiled=True)
