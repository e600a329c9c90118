"""Trees of gradients: which leaves are gradients, and what they measure."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _state

# Of the dtypes in which a true gradient may come out, bfloat16 ends first.
LARGEST_GRAD = float(jnp.finfo(jnp.bfloat16).max)
_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


def map_grads(fun: Callable[..., Any], grads: Any, *rest: Any) -> Any:
  """``jax.tree.map`` over the leaves that are gradients; others stay."""

  def apply(path, leaf, *others):
    return fun(leaf, *others) if is_grad(path, leaf) else leaf

  return jax.tree_util.tree_map_with_path(apply, grads, *rest)


def grad_leaves(tree: Any) -> list[Any]:
  """The leaves of a tree that are gradients."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [leaf for path, leaf in leaves if is_grad(path, leaf)]


def is_grad(path: Any, leaf: Any) -> bool:
  """Whether a leaf, at this path of its tree, is a gradient."""
  return is_inexact(leaf) and not is_overwritten(path)


def is_inexact(leaf: Any) -> bool:
  """Whether a leaf is a float or complex array, or a Python number of them."""
  if not hasattr(leaf, "dtype"):
    return isinstance(leaf, (float, complex))
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_overwritten(path: Any) -> bool:
  """Whether a tree path leads into Flax's fp8 statistics."""
  return any(
    getattr(key, "key", getattr(key, "name", None))
    == _state.OVERWRITE_WITH_GRADIENT
    for key in path
  )


def widen(leaf: Any) -> Any:
  """The leaf in float32 if it is float16 or float8, else as it is."""
  if not is_inexact(leaf) or not is_narrow(jnp.result_type(leaf)):
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(dtype=jnp.float32)
  return lax.convert_element_type(leaf, jnp.float32)


def is_narrow(dtype: Any) -> bool:
  """Whether a float dtype is too narrow in range for unscaled gradients."""
  return jnp.finfo(dtype).bits <= 16 and dtype != jnp.bfloat16


def times(x: Any, factor: jax.typing.ArrayLike) -> jax.Array:
  """X times a float32 scalar, in the dtype of x."""
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    # By parts: the product of two complex numbers loses the sign of zeros.
    return lax.complex(times(x.real, factor), times(x.imag, factor))
  if x.dtype == jnp.bfloat16:
    # In float32, so that a factor that is no power of two rounds only once.
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
  return x * lax.convert_element_type(factor, x.dtype)


def divided_by(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """X divided by a float32 scalar, in the dtype of x."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return lax.complex(divided_by(x.real, divisor), divided_by(x.imag, divisor))
  if x.dtype == jnp.bfloat16:
    return (x.astype(jnp.float32) / divisor).astype(x.dtype)
  return x / lax.convert_element_type(divisor, x.dtype)


def cast_real_or_complex(x: jax.Array, dtype: Any) -> jax.Array:
  """X in another dtype, unless that would drop or invent an imaginary part."""
  is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
  if is_complex != jnp.issubdtype(x.dtype, jnp.complexfloating):
    return x
  return x.astype(dtype)


def at_least_float32(dtype: Any) -> Any:
  """float32 for the dtypes of fewer bits, else the dtype."""
  return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def every_entry_is_finite(grads: Any) -> jax.Array:
  """Whether all gradients are finite; exact, one by one."""
  poison = jnp.float32(0)
  for leaf in grad_leaves(grads):
    poison += _poison_unless(jnp.all(_isfinite(leaf)))
  return is_unpoisoned(poison)


def sum_is_finite(grads: Any, factor: jax.Array | None = None) -> jax.Array:
  """Whether all gradients are finite, for the price of reading them once.

  No inf and no NaN leaves a sum finite, in whatever order XLA adds; a maximum
  may lose a NaN on CPU. The converse has a limit: a leaf whose finite entries
  add up to more than its dtype can hold (a mean of 1e32 over a million float32
  entries) counts as overflowed.

  For 16 bits and fewer XLA would write out a converted copy, and comparing is
  cheaper.

  Args:
    grads: the gradients.
    factor: if given, a float32[] that they will be multiplied by, once they are
      widened; they must be finite then, too.

  Returns:
    bool[].
  """
  poison = jnp.float32(0)
  for leaf in grad_leaves(grads):
    is_small = jnp.finfo(jnp.result_type(leaf)).bits <= 16
    if factor is None and is_small:
      finite = jnp.all(_isfinite(leaf))
    elif factor is None:
      finite = jnp.isfinite(jnp.sum(leaf))
    else:
      # Of magnitudes: large ones of both signs must not cancel, and XLA would
      # write out the products that the optimizer reads, too.
      magnitude = jnp.abs(jnp.asarray(leaf))
      if is_small:
        product = magnitude.astype(jnp.float32) * factor
        finite = jnp.all(product <= LARGEST_GRAD)
      else:
        finite = jnp.isfinite(times(jnp.sum(magnitude), factor))
    poison += _poison_unless(finite)
  return is_unpoisoned(poison)


def is_unpoisoned(poison: jax.Array) -> jax.Array:
  """Whether a float32 scalar is finite, computed once for all its readers.

  XLA copies a cheap scalar computation, and with it the reductions of all
  leaves, into each kernel that reads its result: code and compile time would
  grow with the square of the number of leaves. It does not copy a square root.
  """
  return jnp.isfinite(lax.sqrt(lax.abs(poison)))


def largest_magnitude(grads: Any) -> jax.Array:
  """The largest magnitude in the tree; float32[]; of finite gradients only."""
  amax = jnp.float32(0)
  for leaf in grad_leaves(grads):
    leaf = _float_or_complex(leaf)
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    if not leaf.size:
      continue
    for part in (leaf.real, leaf.imag) if is_complex else (leaf,):
      # Not of abs(part): XLA would write that out for `sum_is_finite`, too.
      largest = jnp.max(jnp.maximum(part, -part))
      # A float64 may lie above float32's range, and still be finite.
      if jnp.finfo(part.dtype).bits > 32:
        largest = jnp.minimum(largest, jnp.asarray(_FLOAT32_MAX, part.dtype))
      amax = jnp.maximum(amax, largest.astype(jnp.float32))
  return amax


def sum_of_squares(grads: Any) -> jax.Array:
  """The squared global norm of a tree; float32[]; inf or NaN where it is."""
  total = jnp.float32(0)
  for leaf in grad_leaves(grads):
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(at_least_float32(leaf.dtype))
    squares = jnp.square(leaf.real)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      squares += jnp.square(leaf.imag)
    total += jnp.sum(squares).astype(jnp.float32)
  return total


def _poison_unless(finite):
  """0 if finite, else NaN: terms of one sum that stand for a conjunction."""
  return lax.select(finite, jnp.float32(0), jnp.float32(jnp.nan))


def _isfinite(leaf):
  return jnp.isfinite(_float_or_complex(leaf))


def _float_or_complex(leaf):
  """The leaf as an array that XLA can reduce: float8 and less in float32."""
  leaf = jnp.asarray(leaf)
  is_tiny = jnp.finfo(leaf.dtype).bits < 16
  return leaf.astype(jnp.float32) if is_tiny else leaf
