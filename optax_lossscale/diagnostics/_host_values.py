"""Values of arrays, read on the host: small arrays, and tests of whole ones.

Only scalars and small arrays are transferred, so an array may be large, or on
several devices or processes. If several processes run a program, a process can
only read the arrays that it holds completely. All processes must decide by the
same values, since they must run the same programs in the same order.

Each test is compiled once for each shape. Arrays of integers, of keys, and Refs
count as finite.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _eqns

# Decorates a function that is compiled for each shape, and run a few times. To
# compile it takes a third of the time, but no other program can call it.
jit_quickly = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def to_host(tree: Any) -> Any:
  """Return a tree of arrays as NumPy arrays, gathered from all processes.

  Flags of an ``update`` under ``shard_map`` or ``vmap``, for example, are
  sharded over the devices. Replicated arrays are read without communication.
  All processes must call this function.

  Args:
    tree: a pytree of arrays. Each should be small, since each process holds all
      of it.
  """
  gather = lambda x: (
    x
    if _arrays.is_addressable(x)
    else multihost_utils.process_allgather(x, tiled=True)
  )
  return jax.device_get(jax.tree.map(gather, tree))


def all_finite(arrays: Iterable[Any]) -> bool:
  """Return whether all entries of all arrays are finite."""
  return not list_nonfinite(arrays)


def list_nonfinite(arrays: Iterable[Any]) -> list[int]:
  """Return the indices of the arrays that are not finite."""
  # Start all tests before the first result is awaited.
  flags = [_test_floats(_is_nonfinite, x) for x in arrays]
  return [i for i, flag in enumerate(jax.device_get(flags)) if flag]


def has_inf(x: Any) -> bool:
  """Return whether an array contains inf."""
  return bool(_test_floats(jnp.isinf, x))


def has_nan(x: Any) -> bool:
  """Return whether an array contains NaN."""
  return bool(_test_floats(jnp.isnan, x))


def is_any_nonzero(arrays: Iterable[Any]) -> bool:
  """Return whether any entry of any array is not zero."""
  # The first array usually decides, so the others need no program.
  return any(bool(jnp.count_nonzero(x)) for x in arrays)


def is_any_different(pairs: Iterable[tuple[Any, Any]]) -> bool:
  """Return whether the arrays of any pair have different entries."""
  return any(bool(find_different_rows(x, y, 0)) for x, y in pairs)


@functools.partial(jit_quickly, static_argnums=2)
def find_different_rows(x: Any, y: Any, num_axes: int) -> jax.Array:
  """Return which rows differ: entries along the first axes; bool[rows]."""
  return jnp.any(x != y, axis=tuple(range(num_axes, x.ndim)))


def has_different_copies(x: jax.Array) -> bool:
  """Return whether devices of this process hold different copies."""
  if len(x.sharding.device_set) == 1:
    return False
  # Each device computes the checksum of the copy that it holds.
  shards = _checksum(x).addressable_shards
  return len({int(shard.data) for shard in shards}) > 1


def compute_amax(arrays: Iterable[Any]) -> float:
  """Return the largest magnitude of all entries; 0.0 without any."""
  return max(map(float, map(_amax, arrays)), default=0.0)


def _test_floats(predicate: Callable[[Any], Any], x: Any) -> Any:
  """Return whether any entry satisfies a predicate; False unless floats."""
  is_float = _arrays.is_inexact(x) and not _eqns.is_ref(jax.typeof(x))
  return is_float and _any_entry(predicate, x)


@functools.partial(jit_quickly, static_argnums=0)
def _any_entry(predicate: Callable[[Any], Any], x: Any) -> jax.Array:
  return predicate(_arrays.upcast_for_reduction(x)).any()


def _is_nonfinite(x: Any) -> jax.Array:
  return ~jnp.isfinite(x)


@jit_quickly
def _checksum(x: Any) -> jax.Array:
  """Return a number that changes with each entry; uint32[]."""
  parts = (x.real, x.imag) if _arrays.is_complex(x.dtype) else (x,)
  bits = [
    lax.bitcast_convert_type(part.astype(jnp.float32), jnp.uint32)
    for part in parts
  ]
  return sum((jnp.sum(x, dtype=jnp.uint32) for x in bits), jnp.uint32(0))


@jit_quickly
def _amax(x: Any) -> jax.Array:
  return jnp.max(jnp.abs(_arrays.upcast_for_reduction(x)), initial=0)
