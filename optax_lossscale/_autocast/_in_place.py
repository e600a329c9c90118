"""Traces functions that change Flax NNX objects in place."""

from collections.abc import Callable
import sys
from typing import Any

import jax


def call(
  transformed: Callable[[Callable[[], Any]], Any],
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
) -> Any:
  """Calls a function within a trace, and keeps what it did to its arguments.

  A Flax NNX object refuses to be changed within a trace that it was not made
  in. So the function is given copies that were made there, and what it changed
  leaves the trace with the result.

  Args:
    transformed: calls a function without arguments within a trace, and returns
      what that one returned.
    fun: the function.
    args: its positional arguments.
    kwargs: its keyword arguments.

  Returns:
    What ``fun`` returned.
  """
  nnx: Any = sys.modules.get("flax.nnx")  # If not, there are no such objects.
  everything = fun, args, kwargs
  if nnx is None or not _holds(everything, nnx):
    return transformed(lambda: fun(*args, **kwargs))
  structure, variables, others = nnx.split(everything, nnx.Variable, ...)

  def call_with_copies() -> tuple[Any, Any]:
    # Copied here, so that they belong to the trace.
    inside = jax.tree.map(lambda x: x, variables)
    copies = nnx.merge(structure, inside, others)
    copied_fun, copied_args, copied_kwargs = copies
    out = copied_fun(*copied_args, **copied_kwargs)
    return out, nnx.state(copies, nnx.Variable)

  out, variables = transformed(call_with_copies)
  nnx.update(everything, variables)
  return out


def _holds(tree: Any, nnx: Any) -> bool:
  kinds = nnx.Module, nnx.Variable
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
  return any(isinstance(x, kinds) for x in leaves)
