"""The updates that a step returns: in the dtypes of the params, or nothing."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _grads


def cast_like(updates: Any, params: Any) -> Any:
  """The updates in the dtypes of the params, where there are params."""
  if params is None:
    return updates

  def cast(path: Any, update: Any, param: Any) -> Any:
    if not _grads.is_grad(path, update) or not _arrays.is_inexact(param):
      return update
    update = jnp.asarray(update)
    return _arrays.cast_real_or_complex(update, jnp.result_type(param))

  # The updates may have None or MaskedNode where the params have a leaf.
  is_leaf = lambda x: x is None or isinstance(x, optax.MaskedNode)
  return jax.tree_util.tree_map_with_path(
    cast, updates, params, is_leaf=is_leaf
  )


def nothing_unless(finite: jax.Array, updates: Any) -> Any:
  """The updates if ``finite``, else updates that leave the params as they are.

  These are 0 for an integer, and else -0.0: 0.0 + (-0.0) and -0.0 + (-0.0) keep
  their sign, and -0.0 + 0.0 does not. Leaves that are not added to a parameter
  stay as they are. (Where XLA flushes subnormal numbers, no update could keep
  subnormal params, since any sum is flushed.)
  """

  def choose(path: Any, update: Any) -> Any:
    if not _arrays.is_array_like(update) or _grads.is_overwritten(path):
      return update
    update = jnp.asarray(update)
    if _arrays.is_inexact(update):
      nothing = _negative_zeros_like(update)
    elif jnp.issubdtype(update.dtype, jnp.integer):
      nothing = jnp.zeros_like(update)
    else:
      return update
    return lax.select(finite, update, nothing)

  return jax.tree_util.tree_map_with_path(choose, updates)


def _negative_zeros_like(x: jax.Array) -> jax.Array:
  if _arrays.is_complex(x.dtype):
    return lax.complex(
      _negative_zeros_like(x.real), _negative_zeros_like(x.imag)
    )
  return jnp.full_like(x, -0.0)
