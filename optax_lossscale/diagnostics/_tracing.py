"""The jaxpr of a function, whatever its arguments are."""

from collections.abc import Callable, Iterator
import contextlib
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _jaxprs


class Traced(NamedTuple):
  """A traced function.

  Attributes:
    closed: its jaxpr. The outputs are the leaves of the result that are floats.
    inputs: the arrays, or their shapes, that the jaxpr takes.
    names: how to name each of them, such as ``batch['image']``.
    results: how to name each output, such as ``[1]['kernel']``.
    groups: for each output, the number of the result that it is part of.
  """

  closed: _jaxprs.ClosedJaxpr
  inputs: list[Any]
  names: list[str]
  results: list[str]
  groups: list[int]


def trace(
  caller: str,
  fun: Callable[..., Any],
  args: Any,
  kwargs: Any,
  *,
  shapes: bool,
) -> Traced:
  """Traces a function once.

  Arrays become inputs of the jaxpr. Everything else (numbers, functions, the
  static parts of a model) stays as it is.

  Args:
    caller: the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.
    shapes: whether shapes are enough.

  Returns:
    A :class:`Traced`.

  Raises:
    TypeError: if ``fun`` is not callable, or, where arrays are needed, this is
      called under ``jit``; if an argument is traced, or is a shape where an
      array is needed.
  """
  if not callable(fun):
    raise TypeError(
      f"fun must be a function, got fun = {fun!r}. Write {caller}(fun, *args),"
      f" not {caller}(fun(*args))."
    )
  leaves, structure = jax.tree.flatten((args, kwargs))
  arguments = _named_arguments(fun, args, kwargs)
  names = [name for name, leaf in arguments if _is_input(leaf)]
  inputs = [leaf for leaf in leaves if _is_input(leaf)]
  for name, leaf in zip(names, inputs, strict=True):
    _check_input(caller, name, leaf, shapes)
  if not shapes and isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(f"{caller} must be called outside jit, {_ON_THE_HOST}.")

  def flat_fun(*traced: Any) -> list[Any]:
    arrays = iter(traced)
    filled = [next(arrays) if _is_input(leaf) else leaf for leaf in leaves]
    its_args, its_kwargs = jax.tree.unflatten(structure, filled)
    found = _floats_in(fun(*its_args, **its_kwargs))
    groups[:] = [i for i, _, _ in found]
    results[:] = [name for _, name, _ in found]
    return [leaf for _, _, leaf in found]

  results: list[str] = []
  groups: list[int] = []
  closed = jax.make_jaxpr(flat_fun)(*inputs)
  return Traced(closed, inputs, names, results, groups)


def _named_arguments(
  fun: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[str, Any]]:
  """The leaves of the arguments, by how a user would write the way to them."""
  names = _parameters(fun)[: len(args)]
  names += [f"args[{i}]" for i in range(len(names), len(args))]
  # Keyword arguments stand in the order in which JAX flattens them.
  arguments = [*zip(names, args, strict=True), *sorted(kwargs.items())]
  return [leaf for argument in arguments for leaf in _named_leaves(*argument)]


def _floats_in(out: Any) -> list[tuple[int, str, Any]]:
  """The floats in what a function returns.

  Each comes with its name, and with the number of the result that it is part
  of, such as the loss or the gradients.
  """
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  return [
    (i, name, leaf)
    for i, (path, result) in enumerate(results)
    for name, leaf in _named_leaves(jax.tree_util.keystr(path), result)
    if _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)
  ]


def _named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree that has this name, by the way to them."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [
    (f"{name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves
  ]


@contextlib.contextmanager
def not_finite_allowed() -> Iterator[None]:
  """Lets functions run, be they finite or not, and as they are compiled."""
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    yield


def mesh_of(arrays: list[Any]) -> contextlib.AbstractContextManager[Any]:
  """The mesh that an operation without inputs would have in a ``jit``."""
  for array in arrays:
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    types = getattr(mesh, "axis_types", ())
    if jax.sharding.AxisType.Explicit in types:
      return jax.set_mesh(mesh)
  return contextlib.nullcontext()


_ON_THE_HOST = "since it runs on the host"


def _is_input(leaf: Any) -> bool:
  if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
    return True
  # Integers of numpy may be sizes and indices that must be known.
  is_numpy = isinstance(leaf, (np.ndarray, np.generic))
  return is_numpy and _arrays.is_inexact(leaf)


def _check_input(caller: str, name: str, leaf: Any, shapes: bool) -> None:
  if isinstance(leaf, jax.core.Tracer):
    raise TypeError(
      f"{caller} must be called outside jit, {_ON_THE_HOST}, got a tracer at"
      f" {name}."
    )
  if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
    raise TypeError(
      f"{caller} needs arrays, since it computes with them, got {leaf} at"
      f" {name}. Only precision_report is content with shapes."
    )


def _parameters(fun: Callable[..., Any]) -> list[str]:
  """The names of the positional parameters, as far as they are known."""
  try:
    parameters = inspect.signature(fun).parameters.values()
  except (TypeError, ValueError):
    return []
  # The two kinds of these come first in the order of all kinds.
  return [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
