"""Arrays and dtypes: what a leaf is, and arithmetic that keeps its dtype."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
# XLA takes smaller numbers for zero, on CPU and on TPU.
FLOAT32_TINY = float(jnp.finfo(jnp.float32).smallest_normal)


def is_array_like(x: Any) -> bool:
  """Whether JAX can compute on this leaf: an array or a Python number."""
  dtype = getattr(x, "dtype", None)
  if dtype is None:
    return isinstance(x, (bool, int, float, complex))
  return dtype != jax.dtypes.float0 and not isinstance(x, jax.ShapeDtypeStruct)


def is_inexact(leaf: Any) -> bool:
  """Whether a leaf is a float or complex array, or a Python number of them."""
  if not hasattr(leaf, "dtype"):
    return isinstance(leaf, (float, complex))
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_complex(dtype: Any) -> bool:
  """Whether a dtype is complex."""
  return jnp.issubdtype(dtype, jnp.complexfloating)


def has_narrow_range(dtype: Any) -> bool:
  """Whether a float dtype has too short a range for unscaled gradients."""
  return jnp.finfo(dtype).bits <= 16 and dtype != jnp.bfloat16


def promote_to_float32(dtype: Any) -> Any:
  """float32 if the dtype has fewer bits, else the dtype."""
  return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def upcast_to_float32(leaf: Any) -> Any:
  """The leaf in float32 if it is float16 or float8, else as it is."""
  if not is_inexact(leaf) or not has_narrow_range(jnp.result_type(leaf)):
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(dtype=jnp.float32)
  return lax.convert_element_type(leaf, jnp.float32)


def upcast_for_reduction(leaf: Any) -> jax.Array:
  """The leaf as an array that XLA can reduce: float8 and less in float32."""
  leaf = jnp.asarray(leaf)
  is_tiny = jnp.finfo(leaf.dtype).bits < 16
  return leaf.astype(jnp.float32) if is_tiny else leaf


def cast(x: Any, dtype: Any) -> Any:
  """``x`` as a strongly typed array; PRNG keys as they are."""
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    return x
  return lax.convert_element_type(x, dtype)


def copy_as(x: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
  """``x`` as a strongly typed array whose buffer nobody else has."""
  return jnp.copy(lax.convert_element_type(x, dtype))


def cast_if_both_real_or_complex(x: jax.Array, dtype: Any) -> jax.Array:
  """``x`` in a dtype that does not drop or invent its imaginary part."""
  if is_complex(dtype) != is_complex(x.dtype):
    return x
  return x.astype(dtype)


def scale_by(x: Any, factor: jax.typing.ArrayLike) -> jax.Array:
  """``x`` times a float32 scalar, in the dtype of ``x``."""
  x = jnp.asarray(x)
  if is_complex(x.dtype):
    # By parts: the product of two complex numbers loses the sign of zeros.
    return lax.complex(scale_by(x.real, factor), scale_by(x.imag, factor))
  if x.dtype == jnp.bfloat16:
    # In float32, so that a factor that is no power of two rounds only once.
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
  return x * lax.convert_element_type(factor, x.dtype)


def unscale_by(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """``x`` divided by a float32 scalar, in the dtype of ``x``."""
  if is_complex(x.dtype):
    return lax.complex(unscale_by(x.real, divisor), unscale_by(x.imag, divisor))
  if x.dtype == jnp.bfloat16:
    return (x.astype(jnp.float32) / divisor).astype(x.dtype)
  return x / lax.convert_element_type(divisor, x.dtype)


def cast_like(x: Any, like: Any) -> Any:
  """``x`` as a strongly typed array of the dtype of ``like``.

  As it is, if ``like`` is neither an array nor a number.
  """
  return cast(x, jnp.result_type(like)) if is_array_like(like) else x


def select(condition: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """``new`` where the condition holds, else ``old``, in the dtypes of ``old``.

  Args:
    condition: a bool of shape ``()``.
    new: a pytree.
    old: a pytree of the same structure. Leaves of it that are not arrays are
      returned in either case.

  Returns:
    A pytree of that structure.
  """

  def select_leaf(new: Any, old: Any) -> Any:
    if not is_array_like(old):
      return old
    new = cast_like(new, old)
    return _select_array(jnp.asarray(condition), new, jnp.asarray(old))

  return jax.tree.map(select_leaf, new, old)


def select_rows(flags: jax.Array, new: Any, old: Any) -> jax.Array:
  """The rows of ``new`` that have a flag, and the others of ``old``."""
  axes = tuple(range(flags.ndim, jnp.ndim(new)))
  return jnp.where(jnp.expand_dims(flags, axes), new, old)


def _select_array(
  condition: jax.Array, new: jax.Array, old: jax.Array
) -> jax.Array:
  """``new`` or ``old``; on TPU in float32 if they are bfloat16.

  XLA's compiler for TPU would give a select in bfloat16 a kernel of its own,
  which reads the gradient and the moment again. It leaves a conversion where it
  is. No number changes, but on GPU the bits of a NaN might.
  """
  is_traced = isinstance(condition, jax.core.Tracer)
  if old.dtype != jnp.bfloat16 or not is_traced:
    return lax.select(condition, new, old)
  return lax.platform_dependent(
    condition, new, old, tpu=_select_in_float32, default=lax.select
  )


def _select_in_float32(
  condition: jax.Array, new: jax.Array, old: jax.Array
) -> jax.Array:
  upcast = (lax.convert_element_type(x, jnp.float32) for x in (new, old))
  return lax.convert_element_type(lax.select(condition, *upcast), old.dtype)
