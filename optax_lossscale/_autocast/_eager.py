"""Counts the calls that nothing compiles, each of which traces again.

Those within a `vmap` outside of `jit` are not seen: nothing tells them from
others.
"""

import collections
from collections.abc import Callable
import functools
import inspect
from typing import Any
import weakref

import jax

from optax_lossscale import _jaxprs

# Two calls are what one makes by hand, before and after a training, say.
_PATIENCE = 3

# How often with which shapes, by the code: a loop may make its loss anew in
# each step. The code is held weakly, and what a function holds not at all.
_counts: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = (
  weakref.WeakKeyDictionary()
)


def message(fun: Callable[..., Any], given: Any, out: Any) -> str:
  """What to tell of a function that is called again and again, or nothing.

  Args:
    fun: the function.
    given: its arguments.
    out: what it returned: this tells whether anything compiles the call.

  Returns:
    The message at the third call with the same shapes outside of ``jit``, and
    nothing at all others.
  """
  arrays = [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]
  # Who turned `jit` off wants it so.
  if jax.config.jax_disable_jit or not arrays:
    return ""
  if not all(map(_jaxprs.is_known, arrays)):
    return ""
  counts = _counts.setdefault(_code_of(fun), collections.Counter())
  shapes = _shapes_of((given, out))
  counts[shapes] += 1
  if counts[shapes] != _PATIENCE:
    return ""
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"autocast ran {name} outside of jit, for the third time with the same"
    " shapes. Each call traces it again, runs its operations one by one, and"
    " compiles anew what is jitted inside: call it in a jitted function, such"
    " as the training step."
  )


def _code_of(fun: Any) -> Any:
  """What is the same if a function, a method or a partial is made anew."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  fun = inspect.unwrap(fun)
  # Of a method or a layer: the code or the class.
  return getattr(fun, "__code__", type(fun))


def _shapes_of(tree: Any) -> int:
  """The shapes and dtypes as one number, so that nothing is held."""
  try:
    leaves = jax.tree.leaves(tree)
  except (TypeError, ValueError):  # Its keys have no order.
    return 0
  as_text = [
    f"{getattr(x, 'dtype', type(x))}{getattr(x, 'shape', '')}" for x in leaves
  ]
  return hash(tuple(as_text))
