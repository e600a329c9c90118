"""A tree of gradients: which leaves are gradients, finite or not, how large."""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays, _paths

# Of the dtypes in which a true gradient may come out, bfloat16 ends first.
MAX_GRAD = float(jnp.finfo(jnp.bfloat16).max)

# Flax keeps the statistics of its fp8 layers in this collection. They arrive
# beside the gradients, but are values to be stored, not gradients.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def partition_grads(
  tree: Any,
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
  """The gradients in a tree, and what puts others in their places.

  Args:
    tree: a pytree.

  Returns:
    The list of the leaves that are gradients, and a function that takes as many
    new ones and returns the tree with these in their places. All other leaves
    stay: integers, bools, float0, PRNG keys, and the statistics of Flax's fp8
    layers.
  """
  paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
  leaves = [leaf for _, leaf in paths_and_leaves]
  grad_indices = [
    i
    for i, path_and_leaf in enumerate(paths_and_leaves)
    if is_grad(*path_and_leaf)
  ]

  def combine(grads: Iterable[Any]) -> Any:
    new_leaves = list(leaves)
    for i, grad in zip(grad_indices, grads, strict=True):
      new_leaves[i] = grad
    return jax.tree.unflatten(structure, new_leaves)

  return [leaves[i] for i in grad_indices], combine


def is_grad(path: Any, leaf: Any) -> bool:
  """Whether a leaf, at this path of its tree, is a gradient."""
  return _arrays.is_inexact(leaf) and not is_fp8_stat(path)


def is_fp8_stat(path: Any) -> bool:
  """Whether a tree path leads into Flax's fp8 statistics."""
  return any(_paths.key_name(key) == _OVERWRITE_WITH_GRADIENT for key in path)


def all_finite(tree: Any) -> jax.Array:
  """Tests, element by element, whether a pytree holds no inf and no NaN.

  Args:
    tree: any pytree. Only leaves of a float or complex dtype are tested, and
      none under Flax's ``_overwrite_with_gradient`` collection.

  Returns:
    A bool of shape ``()``; True for an empty tree.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> print(ols.all_finite({"a": jnp.array([1.0, 2.0]), "b": jnp.inf}))
    False
  """
  grads, _ = partition_grads(tree)
  return _all_finite_by_platform(_elementwise_indicator, grads, None)


def all_finite_by_sum(
  grads: list[Any], factor: jax.Array | None = None
) -> jax.Array:
  """Whether all gradients are finite, by reading them once.

  On CPU it is taken from the sum of each leaf, which XLA makes without writing
  anything. A sum that holds an inf or a NaN is never finite, in whatever order
  XLA adds, while a maximum may lose a NaN on CPU. But a sum may overflow by
  itself: there a leaf counts as not finite if its finite entries add up to more
  than its dtype can hold (a mean of 1e33 over a million float32 entries).

  Args:
    grads: the gradients.
    factor: if given, a float32[] by which they will be multiplied after they
      are widened. The products must be finite, too.

  Returns:
    bool[].
  """
  return _all_finite_by_platform(_sum_indicator, grads, factor)


def largest_magnitude(grads: list[Any]) -> jax.Array:
  """The largest magnitude; float32[]. Means nothing if one is not finite."""
  amax = jnp.float32(0)
  for leaf in grads:
    leaf = _arrays.upcast_for_reduction(leaf)
    if not leaf.size:
      continue
    is_complex = _arrays.is_complex(leaf.dtype)
    for part in (leaf.real, leaf.imag) if is_complex else (leaf,):
      # XLA would write abs(part) to memory, to share it with `sum_is_finite`.
      largest = jnp.max(jnp.maximum(part, -part))
      # A float64 may lie above float32's range, and still be finite.
      if jnp.finfo(part.dtype).bits > 32:
        bound = jnp.asarray(_arrays.FLOAT32_MAX, part.dtype)
        largest = jnp.minimum(largest, bound)
      amax = jnp.maximum(amax, largest.astype(jnp.float32))
  return amax


def sum_of_squares(leaf: Any) -> jax.Array:
  """The squared norm of a gradient; float32[]. Inf or NaN if it holds one."""
  leaf = jnp.asarray(leaf)
  leaf = leaf.astype(_arrays.promote_to_float32(leaf.dtype))
  squares = jnp.square(leaf.real)
  if _arrays.is_complex(leaf.dtype):
    squares += jnp.square(leaf.imag)
  return jnp.sum(squares).astype(jnp.float32)


# What is not finite in a leaf, as a number that can be added up over leaves and
# devices: 0 if all is finite, else NaN, or how many entries are not; float32[].
NonfiniteIndicator = Callable[[Any, jax.Array | None], jax.Array]


def _all_finite_by_platform(
  cpu_indicator: NonfiniteIndicator, grads: list[Any], factor: jax.Array | None
) -> jax.Array:
  on_cpu = functools.partial(_indicators_sum_to_zero, cpu_indicator)
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in grads):
    return on_cpu(grads, factor)
  # Of a number for each leaf, XLA would have to reduce each over the devices.
  # It adds up counts first. On CPU it would write them, a number for each
  # entry, to memory.
  on_accelerator = functools.partial(_indicators_sum_to_zero, _count_indicator)
  return lax.platform_dependent(
    grads, factor, cpu=on_cpu, default=on_accelerator
  )


def _indicators_sum_to_zero(
  indicator: NonfiniteIndicator, grads: list[Any], factor: jax.Array | None
) -> jax.Array:
  return _is_zero(sum((indicator(x, factor) for x in grads), jnp.float32(0)))


def _count_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  return jnp.sum(~_is_finite_scaled(leaf, factor), dtype=jnp.float32)


def _elementwise_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  return _nan_unless_all(_is_finite_scaled(leaf, factor))


def _sum_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  leaf = jnp.asarray(leaf)
  if _is_at_most_16_bit(leaf):
    # To sum them, XLA would write a copy in float32 to memory. It is cheaper to
    # test each element.
    return _elementwise_indicator(leaf, factor)
  if factor is not None:
    # Of magnitudes, for two reasons. Large numbers of both signs could cancel
    # in the sum. And the optimizer needs the products with their signs: XLA
    # would write these to memory, to compute them only once.
    total = _arrays.scale_by(jnp.sum(jnp.abs(leaf)), factor)
  else:
    total = jnp.sum(leaf)
  if _arrays.is_complex(total.dtype):
    return _nan_unless_all(_isfinite(total))
  return (0 * total).astype(jnp.float32)


def _is_finite_scaled(leaf: Any, factor: jax.Array | None) -> jax.Array:
  """Whether each entry is finite once it is widened and multiplied."""
  if factor is None:
    return _isfinite(leaf)
  magnitude = jnp.abs(jnp.asarray(leaf))
  if _is_at_most_16_bit(leaf):
    return magnitude.astype(jnp.float32) * factor <= MAX_GRAD
  return jnp.isfinite(_arrays.scale_by(magnitude, factor))


def _nan_unless_all(flags: jax.Array) -> jax.Array:
  return lax.select(jnp.all(flags), jnp.float32(0), jnp.float32(jnp.nan))


def _is_zero(total: jax.Array) -> jax.Array:
  """Whether what faults add up to is zero.

  XLA copies a cheap scalar computation, and with it the reductions of all
  leaves, into each kernel that reads its result: code and compile time would
  grow with the square of the number of leaves. It does not copy a square root.
  """
  return lax.sqrt(lax.abs(total)) < 1


def _is_at_most_16_bit(leaf: Any) -> bool:
  return jnp.finfo(jnp.result_type(leaf)).bits <= 16


def _isfinite(leaf: Any) -> jax.Array:
  return jnp.isfinite(_arrays.upcast_for_reduction(leaf))
