"""The names that weights give to products: their paths among the arguments.

Many libraries give their layers no scopes. But a product of a layer has an
operand that is one of its weights, and these have a path in the argument that
they came in, such as ``blocks/2/up``.
"""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _jaxprs
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
      named = _in_place.named_leaves(argument)
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


def _is_weight(x: Any) -> bool:
  # The second is what NumPy's arrays have.
  is_array = isinstance(x, jax.Array) or hasattr(x, "__array_interface__")
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)
