"""The arguments of a function: the paths of its weights, and what it changes.

Many libraries give their layers no scopes. But a product of a layer has an
operand that is one of its weights, and these have a path in the argument that
they came in, such as ``blocks/2/up``. And a Flax NNX object among the arguments
may be changed in place.
"""

from collections.abc import Callable
import functools
import inspect
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _flattening, _paths
from optax_lossscale._jaxprs import _weights


def paths_of(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, _weights.WeightPath]:
  """The paths of a function's weights, by the identity of the arrays.

  These are the floats of its first argument with such, a tree or an array:
  parameters come before batches, and what names a layer must be no data.
  """
  owner = fun.__self__ if inspect.ismethod(fun) else fun  # may be a model
  for argument in [owner, *_in_order(fun, args, kwargs)]:
    try:
      named = _named_leaves(argument)
    except (TypeError, ValueError):  # Its keys have no order.
      continue
    floats = [(path, x) for path, x in named if _is_weight(x)]
    if floats:
      return {id(x): path for path, x in floats if path}
  return {}


def _in_order(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
  """The arguments as the function declares them."""
  try:
    bound = inspect.signature(fun).bind(*args, **kwargs)
  except (TypeError, ValueError):
    return [*args, *kwargs.values()]
  return [*bound.args, *bound.kwargs.values()]


def _named_leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  """The leaves of an argument, with the names of the keys on the way to each.

  Raises:
    TypeError or ValueError: if its keys have no order.
  """
  nnx: Any = sys.modules.get("flax.nnx")
  if nnx is not None and holds(tree, (nnx.Module,)):
    flat = nnx.to_flat_state(nnx.state(tree, nnx.Variable))  # It has cycles.
    variables = [(tuple(map(str, path)), x) for path, x in flat]
    return [(path, x) for path, y in variables for x in jax.tree.leaves(y)]
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  names = _paths.leaf_names(path for path, _ in leaves)
  return [
    (tuple(name.split("/")) if path else (), leaf)
    for name, (path, leaf) in zip(names, leaves, strict=True)
  ]


def _is_weight(x: Any) -> bool:
  # The second is what NumPy's arrays have.
  is_array = isinstance(x, jax.Array) or hasattr(x, "__array_interface__")
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


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
  flat = _flattening.flatten_named_trees([("", everything)])
  before = dict(nnx.to_flat_state(nnx.state(everything, nnx.Variable)))

  def call_with_copies() -> tuple[Any, Any]:
    # Copied here, so that they belong to the trace.
    (copies,) = flat.unflatten(flat.leaves)
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
      f"{getattr(fun, '__name__', fun)} inside autocast changes"
      f" {', '.join(paths)} of a Flax NNX object, but the object comes from"
      " outside the transformation around autocast, which can't update it."
      " Differentiate with nnx.value_and_grad or"
      " ols.value_and_grad(..., using=nnx.value_and_grad), or prevent the"
      " change, for example by model.eval()."
    ) from error


def holds(tree: Any, kinds: tuple[Any, ...]) -> bool:
  """Whether there is an object of one of these kinds in a tree."""
  # JAX sorts the keys of a dict, which those of two types refuse.
  is_leaf = lambda x: isinstance(x, (dict, *kinds))
  return any(
    holds([*x.values()], kinds) if isinstance(x, dict) else isinstance(x, kinds)
    for x in jax.tree.leaves(tree, is_leaf=is_leaf)
  )
