"""The gradients in a tree by name, and how to reduce them: numpy or JAX.

Each leaf is reduced where it is, sharded or not, without reshaping or gathering
it. Only the results are read back to the host.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _grads, _paths


def measure_grads(
  tree: Any, caller: str, measure: Callable[[Any], Any]
) -> list[tuple[str, Any, Any]]:
  """Measures the leaves of a tree that are gradients, and reads the results.

  Args:
    tree: any pytree.
    caller: the public function, for the message.
    measure: a function of a numpy or JAX array that returns a pytree of arrays,
      such as :func:`reduce_on_device` returns.

  Returns:
    A list of names, leaves and results, the results on the host.

  Raises:
    TypeError: if called under ``jit``.
  """
  as_array = lambda x: x if isinstance(x, jax.Array) else np.asarray(x)
  leaves = [
    (_paths.leaf_name(path), as_array(leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if _grads.is_grad(path, leaf) and _arrays.is_array_like(leaf)
  ]
  for name, leaf in leaves:
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(
        f"{caller} must be called outside jit, since it reads values, got a"
        f" tracer at {name!r}. Return the gradients from the jitted function,"
        " or use diagnostics.finite_per_leaf in it."
      )
  # All leaves are measured before the first result is read.
  found = jax.device_get([measure(leaf) for _, leaf in leaves])
  return [(*leaf, x) for leaf, x in zip(leaves, found, strict=True)]


def reduce_on_device(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Makes ``fun(xp, leaf, ...)`` run where the leaf is.

  Args:
    fun: a function of an array module and of arrays of this module. Floats that
      it is given have at least 32 bits, since few devices compute with the
      smallest ones.

  Returns:
    A function without the first argument: jitted for JAX arrays, plain numpy
    for numpy arrays, whose float64 JAX would cut to float32.
  """

  @functools.wraps(fun)
  def widened(xp: Any, leaf: Any, *args: Any) -> Any:
    dtype = _arrays.at_least_float32(leaf.dtype)
    return fun(xp, leaf.astype(dtype, copy=False), *args)

  on_device = jax.jit(widened, static_argnums=0)

  def reduce(leaf: Any, *args: Any) -> Any:
    if isinstance(leaf, jax.Array):
      return on_device(jnp, leaf, *args)
    return widened(np, leaf, *args)

  return reduce


def magnitude(xp: Any, leaf: Any) -> Any:
  """The magnitudes; of a complex number, that of the larger part."""
  if xp.iscomplexobj(leaf):
    return xp.maximum(xp.abs(leaf.real), xp.abs(leaf.imag))
  return xp.abs(leaf)


def count(xp: Any, mask: Any) -> Any:
  """How many are true. An int32 could only count to 2**31."""
  return xp.sum(mask, dtype=xp.uint32 if xp is jnp else xp.uint64)
