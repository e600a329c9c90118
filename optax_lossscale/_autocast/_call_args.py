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


def find_weight_paths_by_id(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, _weights.WeightPath]:
  """The paths of a function's weights, by the identity of the arrays.

  These are the floats of its first argument with such, a tree or an array:
  parameters come before batches, and what names a layer must be no data.
  """
  owner = fun.__self__ if inspect.ismethod(fun) else fun  # may be a model
  for argument in [owner, *_bind_arguments(fun, args, kwargs)]:
    try:
      paths_and_leaves = _flatten_with_paths(argument)
    except (TypeError, ValueError):  # Its keys have no order.
      continue
    weights = [(path, x) for path, x in paths_and_leaves if _is_weight(x)]
    if weights:
      return {id(x): path for path, x in weights if path}
  return {}


def _bind_arguments(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
  """The arguments as the function declares them."""
  try:
    bound = inspect.signature(fun).bind(*args, **kwargs)
  except (TypeError, ValueError):
    return [*args, *kwargs.values()]
  return [*bound.args, *bound.kwargs.values()]


def _flatten_with_paths(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  """The leaves of an argument, with the names of the keys on the way to each.

  Raises:
    TypeError or ValueError: if its keys have no order.
  """
  nnx: Any = sys.modules.get("flax.nnx")
  if nnx is not None and has_instance(tree, (nnx.Module,)):
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


def close_over_args(
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
  call_tree = owner, args, kwargs
  if nnx is None or not has_instance(call_tree, (nnx.Module, nnx.Variable)):
    return _rename_like(fun, lambda: fun(*args, **kwargs)), lambda out: out
  flat = _flattening.flatten_named_trees([("", call_tree)])
  old_variables = dict(nnx.to_flat_state(nnx.state(call_tree, nnx.Variable)))

  def call_with_copies() -> tuple[Any, Any]:
    # Copied here, so that they belong to the trace.
    (copies,) = flat.unflatten(flat.leaves)
    fun_copy, args_copy, kwargs_copy = copies
    if inspect.ismethod(fun):
      fun_copy = fun.__func__.__get__(fun_copy)
    out = fun_copy(*args_copy, **kwargs_copy)
    new_variables = nnx.to_flat_state(nnx.state(copies, nnx.Variable))
    mutations = [
      (k, x)
      for k, x in new_variables
      if not _has_same_arrays(old_variables.get(k), x)
    ]
    return out, nnx.from_flat_state(mutations)

  def apply_mutations(result: Any) -> Any:
    out, mutations = result
    if jax.tree.leaves(mutations):
      _update_nnx(call_tree, mutations, fun, nnx)
    return out

  return _rename_like(fun, call_with_copies), apply_mutations


def _rename_like(
  fun: Callable[..., Any], thunk: Callable[[], Any]
) -> Callable[[], Any]:
  """The call, which JAX's messages name after the user's function."""
  wrapper = functools.wraps(fun, updated=())(thunk)
  wrapper.__name__ = f"autocast({getattr(fun, '__name__', fun)})"
  return wrapper


def _has_same_arrays(old_value: Any, new_value: Any) -> bool:
  """Whether a variable holds the very arrays that it held before."""
  old_leaves, new_leaves = (
    jax.tree.leaves(old_value),
    jax.tree.leaves(new_value),
  )
  return len(old_leaves) == len(new_leaves) and all(
    map(operator.is_, old_leaves, new_leaves)
  )


def _update_nnx(call_tree: Any, mutations: Any, fun: Any, nnx: Any) -> None:
  # Not imported, so that Flax need not be there.
  flax_error = sys.modules["flax.errors"].FlaxError
  try:
    nnx.update(call_tree, mutations)
  except flax_error as error:
    flat = nnx.to_flat_state(mutations)
    paths = [".".join(p for p in k if isinstance(p, str)) for k, _ in flat]
    raise ValueError(
      f"{getattr(fun, '__name__', fun)} inside autocast changes"
      f" {', '.join(paths)} of a Flax NNX object, but the object comes from"
      " outside the transformation around autocast, which can't update it."
      " Differentiate with nnx.value_and_grad or"
      " ols.value_and_grad(..., using=nnx.value_and_grad), or prevent the"
      " change, for example by model.eval()."
    ) from error


def has_instance(tree: Any, classes: tuple[Any, ...]) -> bool:
  """Whether there is an object of one of these kinds in a tree."""
  # JAX sorts the keys of a dict, which those of two types refuse.
  is_leaf = lambda x: isinstance(x, (dict, *classes))
  return any(
    has_instance([*x.values()], classes)
    if isinstance(x, dict)
    else isinstance(x, classes)
    for x in jax.tree.leaves(tree, is_leaf=is_leaf)
  )
