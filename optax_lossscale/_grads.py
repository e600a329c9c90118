"""Gradient pytrees: partition, finiteness tests, amax and norms."""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays, _trees

# The largest unscaled gradient that no result dtype (bfloat16, float32, float64
# or complex) turns into inf: bfloat16 has the smallest maximum of them.
MAX_GRAD = float(jnp.finfo(jnp.bfloat16).max)

# Flax keeps the statistics of its fp8 layers in this collection. The backward
# pass returns them among the gradients, but they are values to store.
_OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def partition_grads(
  tree: Any,
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
  """Split a pytree into its gradients and the rest, as Equinox's partition.

  Args:
    tree: a pytree.

  Returns:
    The list of the leaves that are gradients, and a function that takes as many
    new gradients and returns the tree with these. It keeps all other leaves:
    integers, bools, float0, PRNG keys, and the statistics of Flax's fp8 layers.
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
  """Return whether a leaf at a path of its tree is a gradient."""
  return _arrays.is_inexact(leaf) and not is_fp8_stat(path)


def is_fp8_stat(path: Any) -> bool:
  """Return whether a tree path leads into Flax's fp8 statistics."""
  return any(_trees.key_name(key) == _OVERWRITE_WITH_GRADIENT for key in path)


def all_finite(tree: Any) -> jax.Array:
  """Returns whether a pytree holds neither inf nor NaN, testing each entry.

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
  """Return whether all gradients are finite, reading each of them once.

  On CPU, this tests the sum of each leaf, which XLA computes without writing
  intermediate arrays. The sum of a leaf with an inf or a NaN is never finite,
  whatever the order of the additions; a maximum may lose a NaN on CPU. The
  price: a leaf of finite entries also counts as not finite if their sum exceeds
  the range of its dtype (a mean of 1e33 over a million float32 entries).

  Args:
    grads: the gradients.
    factor: a float32[] by which the gradients will be multiplied after they are
      upcast, or None. The results must be finite, too.

  Returns:
    A bool[].
  """
  return _all_finite_by_platform(_sum_indicator, grads, factor)


def largest_magnitude(grads: list[Any]) -> jax.Array:
  """Return the largest magnitude of the gradients; float32[].

  The result is undefined if an entry is not finite.
  """
  maxima = []
  for leaf in grads:
    leaf = _arrays.upcast_for_reduction(leaf)
    if not leaf.size:
      continue
    is_complex = _arrays.is_complex(leaf.dtype)
    for part in (leaf.real, leaf.imag) if is_complex else (leaf,):
      # Not abs(part): XLA would share abs(part) with `_sum_indicator`, and
      # write it to memory for that.
      magnitude = lax.max(part, lax.neg(part))
      largest = lax.reduce_max(magnitude, _all_axes(magnitude))
      # A finite float64 may exceed the range of float32.
      if jnp.finfo(part.dtype).bits > 32:
        bound = jnp.asarray(_arrays.FLOAT32_MAX, part.dtype)
        largest = jnp.minimum(largest, bound)
      maxima.append(largest.astype(jnp.float32))
  return _arrays.fold_by_platform(lax.max, maxima, jnp.float32(0))


def sum_of_squares(leaf: Any) -> jax.Array:
  """Return the squared norm of a gradient; float32[].

  The result is inf or NaN if the gradient contains an inf or a NaN.
  """
  leaf = jnp.asarray(leaf)
  leaf = leaf.astype(_arrays.promote_to_float32(leaf.dtype))
  squares = jnp.square(leaf.real)
  if _arrays.is_complex(leaf.dtype):
    squares += jnp.square(leaf.imag)
  return jnp.sum(squares).astype(jnp.float32)


# Maps a leaf and the factor of `all_finite_by_sum` to a float32[] that is 0 if
# all entries are finite. Otherwise it is NaN or the number of nonfinite
# entries, so the sum over leaves and devices is 0 only if all are finite.
NonfiniteIndicator = Callable[[Any, jax.Array | None], jax.Array]


def _all_finite_by_platform(
  cpu_indicator: NonfiniteIndicator, grads: list[Any], factor: jax.Array | None
) -> jax.Array:
  on_cpu = functools.partial(
    _indicators_sum_to_zero, cpu_indicator, fold=_arrays.fold_in_chunks
  )
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in grads):
    return on_cpu(grads, factor)
  # On accelerators, count the nonfinite entries and sum the counts over leaves:
  # then XLA needs one all-reduce instead of one for each leaf. On CPU it would
  # write the mask that is counted to memory.
  on_accelerator = functools.partial(_indicators_sum_to_zero, _count_indicator)
  return lax.platform_dependent(
    grads, factor, cpu=on_cpu, default=on_accelerator
  )


def _indicators_sum_to_zero(
  indicator: NonfiniteIndicator,
  grads: list[Any],
  factor: jax.Array | None,
  *,
  fold: Callable[..., jax.Array] = _arrays.fold,
) -> jax.Array:
  """Return whether all gradients are finite, by summing their indicators."""
  indicators = [indicator(x, factor) for x in grads]
  return _is_zero(fold(lax.add, indicators, jnp.float32(0)))


def _count_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  """Return the number of nonfinite entries; a `NonfiniteIndicator`."""
  flags = lax.bitwise_not(_is_finite_scaled(leaf, factor))
  return lax.reduce_sum(
    lax.convert_element_type(flags, jnp.float32), _all_axes(flags)
  )


def _elementwise_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  """Return 0 or NaN from a test of each entry; a `NonfiniteIndicator`."""
  return _nan_unless_all(_is_finite_scaled(leaf, factor))


def _sum_indicator(leaf: Any, factor: jax.Array | None) -> jax.Array:
  """Return 0 or NaN from the sum of the entries; a `NonfiniteIndicator`."""
  leaf = jnp.asarray(leaf)
  if _is_at_most_16_bit(leaf):
    # To sum 16-bit entries, XLA would write a float32 copy to memory. Testing
    # each entry is cheaper.
    return _elementwise_indicator(leaf, factor)
  if factor is not None:
    # Sum magnitudes, for two reasons. Large entries of opposite signs could
    # cancel, although one of them times the factor overflows. And the optimizer
    # needs the scaled entries with their signs: XLA would compute these only
    # once, and write them to memory.
    magnitudes = lax.abs(leaf)
    total = lax.reduce_sum(magnitudes, _all_axes(magnitudes))
    total = _arrays.scale_by(total, factor)
  else:
    total = lax.reduce_sum(leaf, _all_axes(leaf))
  if _arrays.is_complex(total.dtype):
    return _nan_unless_all(_finite_mask(total))
  # 0 * inf and 0 * NaN are NaN.
  zero_or_nan = lax.mul(total, lax.full_like(total, 0))
  return lax.convert_element_type(zero_or_nan, jnp.float32)


def _is_finite_scaled(leaf: Any, factor: jax.Array | None) -> jax.Array:
  """Return whether each entry is finite after upcasting and scaling."""
  if factor is None:
    return _finite_mask(leaf)
  magnitude = jnp.abs(jnp.asarray(leaf))
  if _is_at_most_16_bit(leaf):
    return magnitude.astype(jnp.float32) * factor <= MAX_GRAD
  return jnp.isfinite(_arrays.scale_by(magnitude, factor))


def _nan_unless_all(flags: jax.Array) -> jax.Array:
  all_true = lax.reduce_and(flags, _all_axes(flags))
  return lax.select(all_true, jnp.float32(0), jnp.float32(jnp.nan))


def _is_zero(total: jax.Array) -> jax.Array:
  """Return whether a sum of indicators is zero, by its square root.

  The square root keeps compile time linear in the number of leaves. XLA copies
  a cheap scalar computation, with the reductions of all leaves, into each
  kernel that reads its result. It does not copy a square root.
  """
  return lax.sqrt(lax.abs(total)) < 1


def _is_at_most_16_bit(leaf: Any) -> bool:
  return jnp.finfo(jnp.result_type(leaf)).bits <= 16


def _finite_mask(leaf: Any) -> jax.Array:
  leaf = _arrays.upcast_for_reduction(leaf)
  # For real numbers, the function of lax takes half as long to trace.
  if _arrays.is_complex(leaf.dtype):
    return jnp.isfinite(leaf)
  return lax.is_finite(leaf)


def _all_axes(x: jax.Array) -> tuple[int, ...]:
  return tuple(range(x.ndim))
