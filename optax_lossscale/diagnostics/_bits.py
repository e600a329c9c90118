"""Arrays of marks: made, put and read on the device that holds the array."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def are_finite(arrays: list[Any]) -> list[bool]:
  """Whether each of the arrays is finite; all that are no floats are."""
  # What a Ref holds is looked at when it is read.
  floats = {
    i: x
    for i, x in enumerate(arrays)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
  }
  found = dict(zip(floats, _flags(list(floats.values())), strict=True))
  found = jax.device_get(found)
  return [bool(found.get(i, True)) for i in range(len(arrays))]


def union(marks: Any) -> int:
  """All bits that are set in the marks."""
  # On the host: not all devices can take the union over others.
  different = np.unique(jax.device_get(marks)).tolist()
  return functools.reduce(operator.or_, different, 0)


def no_marks(like: Any) -> Any:
  """Marks of this shape that mark nothing."""
  return jnp.zeros_like(like, jnp.uint32)


@jax.jit
def keep_only(array: Any, marks: Any, bit: Any, neutral: Any) -> Any:
  """The array, with a neutral number in each entry that has not this bit."""
  others = (marks != 0) & (marks & bit == 0)
  return jnp.where(others, jnp.asarray(neutral, array.dtype), array)


@jax.jit
def _not_finite(x: Any) -> Any:
  if jnp.finfo(x.dtype).bits < 16:  # not all functions know such dtypes
    x = x.astype(jnp.float32)
  return ~jnp.isfinite(x)


@jax.jit
def attribute(
  out: Any, without: Any, alone: Any, bits: Any, rest: Any, constants: Any
) -> tuple[Any, Any, Any]:
  """The marks of an output, which entries are the operation's own, if any.

  All in one function, since each shape costs a compilation of each function.
  """
  bad = _not_finite(out)
  is_own = jnp.zeros_like(bad)
  if without is not None:
    is_own = bad & _not_finite(without)
  marks = no_marks(out)
  for bit, with_this in zip(bits, alone, strict=True):
    reached = bad & _not_finite(with_this) & ~is_own
    marks = jnp.where(reached, marks | bit, marks)
  marks = jnp.where(bad & ~is_own & (marks == 0), rest, marks)
  # An inf that was written there is no fault. The NaN that is made of it is.
  is_constant = (marks != 0) & (marks & ~constants == 0)
  is_own = is_own | (jnp.isnan(out) & is_constant)
  return marks, is_own, is_own.any()


@jax.jit
def put(marks: Any, where: Any, bit: Any) -> Any:
  """The marks, with this bit alone in some places."""
  return jnp.where(where, bit, marks)


@jax.jit
def fill(marks: Any, out: Any, bits: Any) -> Any:
  """The marks, with these bits on what is not finite and has none."""
  return jnp.where(_not_finite(out) & (marks == 0), bits, marks)


@jax.jit
def mark_all(out: Any, bits: Any) -> Any:
  """Marks with these bits wherever an array is not finite."""
  return jnp.where(_not_finite(out), bits, np.uint32(0))


@jax.jit
def has_nan(x: Any) -> Any:
  """Whether an array holds a NaN."""
  return jnp.isnan(x).any()


@jax.jit
def _flags(arrays: list[Any]) -> Any:
  return [~_not_finite(x).any() for x in arrays]
