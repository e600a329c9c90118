"""The gradients in a tree by name, and reductions of one: numpy or JAX.

What reads values on the host reads scalars: each leaf is reduced where it
lies, sharded or not, without reshaping or gathering it.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _grads


def measure_grads(
  tree: Any, caller: str, measure: Callable[[Any], Any]
) -> list[tuple[str, Any, Any]]:
  """Measures the leaves of a tree that are gradients, and reads the results.

  Args:
    tree: any pytree.
    caller: the public function, for the message.
    measure: what is to be measured: a function of a numpy or JAX array that
      returns a pytree of arrays, as :func:`reduce_on_device` makes one.

  Returns:
    A list of names, leaves and results, the results on the host.

  Raises:
    TypeError: if called under ``jit``.
  """
  leaves = _named_grads(tree, caller)
  # All are on their way before the first is read.
  found = jax.device_get([measure(leaf) for _, leaf in leaves])
  return [(*leaf, x) for leaf, x in zip(leaves, found, strict=True)]


def _named_grads(tree: Any, caller: str) -> list[tuple[str, Any]]:
  """The leaves that are gradients, as (name, numpy or JAX array)."""
  leaves = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not _grads.is_grad(path, leaf) or not _arrays.is_array(leaf):
      continue
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(
        f"{caller} must be called outside jit, since it reads values, got a"
        f" tracer at {leaf_name(path)!r}. Return the gradients from the jitted"
        " function, or use diagnostics.finite_per_leaf in it."
      )
    if not isinstance(leaf, jax.Array):
      leaf = np.asarray(leaf)
    leaves.append((leaf_name(path), leaf))
  return leaves


def leaf_name(path: Any) -> str:
  """The name of a leaf, such as ``layers/0/weight``."""
  # Flax NNX keeps each array as the value of a variable.
  is_attribute = path and isinstance(path[-1], jax.tree_util.GetAttrKey)
  if len(path) > 1 and is_attribute and path[-1].name == "value":
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")


def reduce_on_device(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Lets ``fun(xp, leaf, ...)`` run where the leaf lies.

  Args:
    fun: a function of the array module and arrays of it. Is given floats of 32
      bits at least: a tiny one has operations on few devices.

  Returns:
    A function without the first argument: jitted for JAX arrays, plain numpy
    for numpy arrays, whose float64 JAX would cut to float32.
  """

  @functools.wraps(fun)
  def on_host(leaf: Any, *args: Any) -> Any:
    return fun(np, _at_least_32_bits(leaf), *args)

  @jax.jit
  @functools.wraps(fun)
  def on_device(leaf: Any, *args: Any) -> Any:
    return fun(jnp, _at_least_32_bits(leaf), *args)

  def reduce(leaf: Any, *args: Any) -> Any:
    reduce_leaf = on_device if isinstance(leaf, jax.Array) else on_host
    return reduce_leaf(leaf, *args)

  reduce.on_device = on_device  # type: ignore[attr-defined]
  return reduce


def magnitude(xp: Any, leaf: Any) -> Any:
  """The magnitudes; of a complex number the larger part's."""
  if xp.iscomplexobj(leaf):
    return xp.maximum(xp.abs(leaf.real), xp.abs(leaf.imag))
  return xp.abs(leaf)


def count(xp: Any, mask: Any) -> Any:
  """How many are true. int32 would end at 2**31."""
  return xp.sum(mask, dtype=xp.uint32 if xp is jnp else xp.uint64)


def _at_least_32_bits(leaf: Any) -> Any:
  return leaf if jnp.finfo(leaf.dtype).bits >= 32 else leaf.astype(np.float32)
