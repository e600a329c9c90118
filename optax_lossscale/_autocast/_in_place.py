"""Traces functions that change Flax NNX objects in place."""

from collections.abc import Callable
import functools
import inspect
import operator
import sys
from typing import Any

import jax


def without_arguments(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
  """A function of no arguments, to be called within a trace.

  A Flax NNX object refuses to be changed within a trace that it was not made
  in. So the function is given copies that were made there, and what it changed
  leaves the trace with the result. What it did not change stays untouched: it
  may be of a trace in which nothing may be changed at all.

  Args:
    fun: the function.
    args: its positional arguments.
    kwargs: its keyword arguments.

  Returns:
    The function of no arguments; and what takes its result outside of the
    trace, changes the arguments in place as ``fun`` did, and returns what
    ``fun`` returned. It raises a ValueError if they may not be changed there.
  """
  nnx: Any = sys.modules.get("flax.nnx")  # If not, there are no such objects.
  owner = fun.__self__ if inspect.ismethod(fun) else fun
  everything = owner, args, kwargs
  if nnx is None or not holds(everything, (nnx.Module, nnx.Variable)):
    return _named_as(fun, lambda: fun(*args, **kwargs)), lambda out: out
  structure, variables, others = nnx.split(everything, nnx.Variable, ...)
  before = dict(nnx.to_flat_state(variables))

  def call_with_copies() -> tuple[Any, Any]:
    # Copied here, so that they belong to the trace.
    inside = jax.tree.map(lambda x: x, variables)
    copies = nnx.merge(structure, inside, others)
    copied, copied_args, copied_kwargs = copies
    if inspect.ismethod(fun):
      copied = fun.__func__.__get__(copied)
    out = copied(*copied_args, **copied_kwargs)
    after = nnx.to_flat_state(nnx.state(copies, nnx.Variable))
    changed = [(k, x) for k, x in after if not _is_same(before.get(k), x)]
    return out, nnx.from_flat_state(changed)

  def put_in_place(result: Any) -> Any:
    out, changed = result
    if jax.tree.leaves(changed):
      _update(everything, changed, fun, nnx)
    return out

  return _named_as(fun, call_with_copies), put_in_place


def _named_as(
  fun: Callable[..., Any], call: Callable[[], Any]
) -> Callable[[], Any]:
  """The call, which JAX's messages name after the user's function."""
  named = functools.wraps(fun, updated=())(call)
  named.__name__ = f"autocast({getattr(fun, '__name__', fun)})"
  return named


def _is_same(before: Any, after: Any) -> bool:
  """Whether a variable holds the very arrays that it held before."""
  old, new = jax.tree.leaves(before), jax.tree.leaves(after)
  return len(old) == len(new) and all(map(operator.is_, old, new))


def _update(everything: Any, changed: Any, fun: Any, nnx: Any) -> None:
  # Not imported, so that Flax need not be there.
  flax_error = sys.modules["flax.errors"].FlaxError
  try:
    nnx.update(everything, changed)
  except flax_error as error:
    flat = nnx.to_flat_state(changed)
    paths = [".".join(p for p in k if isinstance(p, str)) for k, _ in flat]
    raise ValueError(
      f"{getattr(fun, '__name__', fun)} within autocast must not change a Flax"
      " NNX object that comes from outside of the transformation around it, got"
      f" a change of {', '.join(paths)}. Differentiate with nnx.value_and_grad"
      " (optax_lossscale.value_and_grad takes using=nnx.value_and_grad), or do"
      " not let the object change, such as by model.eval()."
    ) from error


def holds(tree: Any, kinds: tuple[Any, ...]) -> bool:
  """Whether there is an object of one of these kinds in a tree."""
  # JAX sorts the keys of a dict, which those of two types refuse.
  is_leaf = lambda x: isinstance(x, (dict, *kinds))
  return any(
    holds([*x.values()], kinds) if isinstance(x, dict) else isinstance(x, kinds)
    for x in jax.tree.leaves(tree, is_leaf=is_leaf)
  )
