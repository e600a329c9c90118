"""Helpers for arrays: predicates, casts, selects, folds and transfers."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, ParamSpec, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
# On CPU and TPU, XLA flushes smaller numbers to zero.
FLOAT32_TINY = float(jnp.finfo(jnp.float32).smallest_normal)
# The number of scalars that `fold_in_chunks` combines in a kernel.
_CHUNK_SIZE = 8


def is_array_like(x: Any) -> bool:
  """Return whether JAX can compute on x: an array or a Python number."""
  dtype = getattr(x, "dtype", None)
  if dtype is None:
    return isinstance(x, (bool, int, float, complex))
  # float0 is the dtype of the gradient of an integer, and holds no data.
  return dtype != jax.dtypes.float0 and not isinstance(x, jax.ShapeDtypeStruct)


def is_addressable(x: Any) -> bool:
  """Return whether this process can read the whole array."""
  return getattr(x, "is_fully_addressable", True) or x.is_fully_replicated


def is_inexact(leaf: Any) -> bool:
  """Return whether a leaf is a float or complex array or Python number."""
  if not hasattr(leaf, "dtype"):
    return isinstance(leaf, (float, complex))
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
  """Return whether x is an array of PRNG keys, and not of their raw data."""
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_complex(dtype: Any) -> bool:
  """Return whether a dtype is complex."""
  return jnp.issubdtype(dtype, jnp.complexfloating)


def has_narrow_range(dtype: Any) -> bool:
  """Return whether a float dtype has a smaller range than bfloat16."""
  return jnp.finfo(dtype).bits <= 16 and dtype != jnp.bfloat16


def promote_to_float32(dtype: Any) -> Any:
  """Return float32 for dtypes of fewer than 32 bits, else the dtype."""
  return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def upcast_to_float32(leaf: Any) -> Any:
  """Cast float16 and float8 leaves to float32; return others unchanged."""
  if not is_inexact(leaf) or not has_narrow_range(jnp.result_type(leaf)):
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(dtype=jnp.float32)
  return lax.convert_element_type(leaf, jnp.float32)


def upcast_for_reduction(leaf: Any) -> jax.Array:
  """Cast dtypes of fewer than 16 bits, which XLA can't reduce, to float32."""
  leaf = jnp.asarray(leaf)
  is_tiny = jnp.finfo(leaf.dtype).bits < 16
  return leaf.astype(jnp.float32) if is_tiny else leaf


def cast(x: Any, dtype: Any) -> Any:
  """Cast x to a strongly typed array; return PRNG keys unchanged."""
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    return x
  return lax.convert_element_type(x, dtype)


def copy_as(x: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
  """Copy x into a new buffer of a dtype.

  The leaves of a state must not share a buffer: a jitted step that donates its
  state would donate the buffer twice.
  """
  return jnp.copy(lax.convert_element_type(x, dtype))


def fold_by_platform(
  op: Callable[[Any, Any], jax.Array],
  scalars: Sequence[jax.Array],
  initial: jax.Array,
) -> jax.Array:
  """Call :func:`fold_in_chunks` on CPU, and :func:`fold` on accelerators.

  Args:
    op: a binary operation on scalars.
    scalars: the scalars.
    initial: the first operand.
  """
  if len(scalars) <= _CHUNK_SIZE or not _has_tracer(scalars):
    return fold(op, scalars, initial)
  return lax.platform_dependent(
    scalars,
    initial,
    cpu=functools.partial(fold_in_chunks, op),
    default=functools.partial(fold, op),
  )


def fold(
  op: Callable[[Any, Any], jax.Array],
  scalars: Sequence[jax.Array],
  initial: jax.Array,
) -> jax.Array:
  """Combine scalars by a binary operation, from the first to the last.

  XLA reduces a sum of sharded arrays over the devices at once, whatever their
  number.
  """
  return functools.reduce(op, scalars, initial)


def fold_in_chunks(
  op: Callable[[Any, Any], jax.Array],
  scalars: Sequence[jax.Array],
  initial: jax.Array,
) -> jax.Array:
  """Combine scalars like :func:`fold`, in kernels of a limited size.

  XLA's CPU compiler fuses a chain of scalar operations into one kernel, whose
  compile time grows faster than its number of operands. A barrier after each
  chunk keeps the compile time linear, except before JAX 0.12, whose compiler
  ignores the barrier. The result is the same, bit for bit.
  """
  result = initial
  for i, scalar in enumerate(scalars):
    if i and i % _CHUNK_SIZE == 0 and _has_tracer([result]):
      result = lax.optimization_barrier(result)
    result = op(result, scalar)
  return result


def _has_tracer(leaves: Sequence[Any]) -> bool:
  return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def scale_by(x: Any, factor: jax.typing.ArrayLike) -> jax.Array:
  """Multiply x by a float32 scalar; return the dtype of x."""
  x = jnp.asarray(x)
  if is_complex(x.dtype):
    # Scale the parts separately, because a complex multiplication loses the
    # sign of zeros.
    return lax.complex(scale_by(x.real, factor), scale_by(x.imag, factor))
  if x.dtype == jnp.bfloat16:
    # Multiply in float32, because rounding the factor to bfloat16 as well would
    # round twice if the factor is not a power of two.
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
  return x * lax.convert_element_type(factor, x.dtype)


def unscale_by(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """Divide x by a float32 scalar; return the dtype of x."""
  if is_complex(x.dtype):
    return lax.complex(unscale_by(x.real, divisor), unscale_by(x.imag, divisor))
  if x.dtype == jnp.bfloat16:
    return (x.astype(jnp.float32) / divisor).astype(x.dtype)
  return x / lax.convert_element_type(divisor, x.dtype)


def cast_like(x: Any, like: Any) -> Any:
  """Cast x to the dtype of ``like``, as a strongly typed array.

  If ``like`` is neither an array nor a number, x is returned unchanged.
  """
  return cast(x, jnp.result_type(like)) if is_array_like(like) else x


def select(condition: jax.typing.ArrayLike, new: Any, old: Any) -> Any:
  """Return ``new`` if the condition is true, else ``old``.

  Args:
    condition: a bool of shape ``()``.
    new: a pytree.
    old: a pytree of the same structure. Leaves of ``old`` that are not arrays
      are returned in either case.

  Returns:
    A pytree of the same structure, in the dtypes of ``old``.
  """

  def select_leaf(new: Any, old: Any) -> Any:
    if not is_array_like(old):
      return old
    if is_key(old):
      return _select_key(jnp.asarray(condition), new, old)
    new = cast_like(new, old)
    return _select_array(jnp.asarray(condition), new, jnp.asarray(old))

  return jax.tree.map(select_leaf, new, old)


def _select_key(
  condition: jax.Array, new: jax.Array, old: jax.Array
) -> jax.Array:
  """Select between two PRNG keys, of which the old one may be used.

  With `jax_debug_key_reuse`, JAX raises an error for a select of a used key,
  and for a use of what a select returns. Using the old key again is correct: it
  is selected only if the results of its first use are discarded. Clones tell
  JAX so, and are no-ops in a compiled program. A new key that the inner update
  has used still raises the error.
  """
  if new is old:
    return old
  selected = lax.select(condition, new, jax.random.clone(old))
  return jax.random.clone(selected)


def _select_array(
  condition: jax.Array, new: jax.Array, old: jax.Array
) -> jax.Array:
  """Select between two arrays, on TPU in float32 if they are bfloat16.

  XLA's TPU compiler puts a bfloat16 select into a separate kernel, which reads
  the gradient and the moment again. It fuses a float32 select and its casts.
  The casts are exact. They are restricted to TPU, because on GPU they may
  change the bits of a NaN.
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


def allow_transfers(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
  """Decorate a function to allow transfers between host and devices.

  Training loops set the guard to find unintended transfers. A report has to
  transfer data.
  """

  @functools.wraps(fun)
  def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
    with jax.transfer_guard("allow"):
      return fun(*args, **kwargs)

  return wrapper
