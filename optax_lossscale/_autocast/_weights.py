"""The names that weights give to products: their paths among the arguments.

Many libraries give their layers no scopes. But a product of a layer has an
operand that is one of its weights, and these have a path in the argument that
they came in, such as ``blocks/2/up``.
"""

from collections.abc import Callable
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _jaxprs, _paths
from optax_lossscale._autocast import _in_place


def paths_of(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, _jaxprs.Path]:
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
  if nnx is not None and _in_place.holds(tree, (nnx.Module,)):
    flat = nnx.to_flat_state(nnx.state(tree, nnx.Variable))  # It has cycles.
    variables = [(tuple(map(str, path)), x) for path, x in flat]
    return [(path, x) for path, y in variables for x in jax.tree.leaves(y)]
  return [
    (tuple(_paths.leaf_name(path).split("/")) if path else (), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _is_weight(x: Any) -> bool:
  # The second is what NumPy's arrays have.
  is_array = isinstance(x, jax.Array) or hasattr(x, "__array_interface__")
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)
