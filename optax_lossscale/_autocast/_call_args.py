"""Finds the weight paths among a function's arguments, and returns mutations.

Many libraries don't enter a name scope for each layer. But one operand of the
layer's matmul is a weight, and the weight has a path in the function's
argument, such as ``blocks/2/up``, which names the layer instead.

The function may also mutate Flax NNX modules among its arguments. Flax allows
this only in the trace that created a module, so `close_over_args` copies the
modules into the trace and applies the mutations afterwards.
"""

from collections.abc import Callable
import functools
import inspect
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _trees
from optax_lossscale._jaxprs import _weights


def find_weight_paths_by_id(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, _weights.WeightPath]:
  """Return the paths of a function's weights, by the ``id`` of the array.

  The weights are the float arrays of the first argument that contains any.
  Later arguments may be batches, whose paths must not name a layer.

  Args:
    fun: the function. A model that is called counts as the first argument.
    args: the positional arguments.
    kwargs: the keyword arguments.

  Returns:
    The path of each weight. A weight that is an argument itself has no path.
  """
  owner = fun.__self__ if inspect.ismethod(fun) else fun
  for argument in [owner, *_bind_arguments(fun, args, kwargs)]:
    try:
      paths_and_leaves = _flatten_with_paths(argument)
    except (TypeError, ValueError):  # JAX can't sort the keys of a dict.
      continue
    weights = [(path, x) for path, x in paths_and_leaves if _is_float_array(x)]
    # The ids stay valid because the caller's arguments outlive the trace.
    if weights:
      return {id(x): path for path, x in weights if path}
  return {}


def _bind_arguments(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
  """Return the arguments in the order in which the function declares them."""
  try:
    bound = inspect.signature(fun).bind(*args, **kwargs)
  except (TypeError, ValueError):  # A built-in may have no signature.
    return [*args, *kwargs.values()]
  return [*bound.args, *bound.kwargs.values()]


def _flatten_with_paths(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  """Return the leaves of an argument, each with the names of its keys.

  Raises:
    TypeError or ValueError: if JAX can't sort the keys of a dict.
  """
  nnx: Any = sys.modules.get("flax.nnx")
  if nnx is not None and has_instance(tree, (nnx.Module,)):
    # An NNX module is a graph that may have cycles, so it is no pytree.
    flat = nnx.to_flat_state(nnx.state(tree, nnx.Variable))
    variables = [(tuple(map(str, path)), x) for path, x in flat]
    return [(path, x) for path, y in variables for x in jax.tree.leaves(y)]
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  names = _trees.leaf_names(path for path, _ in leaves)
  return [
    (tuple(name.split("/")) if path else (), leaf)
    for name, (path, leaf) in zip(names, leaves, strict=True)
  ]


def _is_float_array(x: Any) -> bool:
  """Return whether this is a float array, of JAX or of NumPy."""
  is_array = isinstance(x, jax.Array) or hasattr(x, "__array_interface__")
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def close_over_args(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
  """Return the call of a function as a thunk that can be traced.

  A Flax NNX object raises an error if it is mutated in another trace than the
  one that created it. So the thunk calls the function with copies that it
  creates in the trace, and returns the mutated variables as additional output.
  Variables that the function did not mutate are not updated afterwards, because
  they may belong to a trace where updates are not allowed.

  Args:
    fun: the function.
    args: the positional arguments.
    kwargs: the keyword arguments.

  Returns:
    The thunk, and a function to call outside the trace. The latter takes the
    output of the thunk, mutates the arguments as ``fun`` did, and returns the
    output of ``fun``. It raises a ValueError if a mutation is not allowed.
  """
  # If Flax is not imported, no argument is a Flax object.
  nnx: Any = sys.modules.get("flax.nnx")
  owner = fun.__self__ if inspect.ismethod(fun) else fun
  call_tree = owner, args, kwargs
  if nnx is None or not has_instance(call_tree, (nnx.Module, nnx.Variable)):
    return _rename_like(fun, lambda: fun(*args, **kwargs)), lambda out: out
  flat = _trees.flatten_named_trees([("", call_tree)])
  old_variables = dict(nnx.to_flat_state(nnx.state(call_tree, nnx.Variable)))

  def call_with_copies() -> tuple[Any, Any]:
    # `unflatten` creates the copies here, inside the trace.
    (copies,) = flat.unflatten(flat.leaves)
    fun_copy, args_copy, kwargs_copy = copies
    # The tree contains the object of a bound method, which must be the copy.
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
  """Return the thunk with a name by which JAX's errors show the function."""
  wrapper = functools.wraps(fun, updated=())(thunk)
  wrapper.__name__ = f"autocast({getattr(fun, '__name__', fun)})"
  return wrapper


def _has_same_arrays(old_value: Any, new_value: Any) -> bool:
  """Return whether two values of a variable consist of identical objects.

  Each operation of a trace returns a new tracer, so identity is enough.
  """
  old_leaves, new_leaves = (
    jax.tree.leaves(old_value),
    jax.tree.leaves(new_value),
  )
  return len(old_leaves) == len(new_leaves) and all(
    map(operator.is_, old_leaves, new_leaves)
  )


def _update_nnx(call_tree: Any, mutations: Any, fun: Any, nnx: Any) -> None:
  """Apply mutations to Flax NNX objects.

  Args:
    call_tree: the function and its arguments.
    mutations: the state of the mutated variables.
    fun: the function, for the error message.
    nnx: the module ``flax.nnx``.

  Raises:
    ValueError: if an object must not be mutated in the current trace.
  """
  # This does not import Flax, which is an optional dependency.
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
  """Return whether a tree contains an instance of one of the classes."""
  # JAX raises an error for a dict whose keys can't be sorted, so dicts are
  # leaves here, and the recursion enters their values.
  is_leaf = lambda x: isinstance(x, (dict, *classes))
  return any(
    has_instance([*x.values()], classes)
    if isinstance(x, dict)
    else isinstance(x, classes)
    for x in jax.tree.leaves(tree, is_leaf=is_leaf)
  )
