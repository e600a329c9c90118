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
  paths, structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
  leaves = [leaf for _, leaf in paths]
  places = [i for i, leaf in enumerate(leaves) if _is_input(leaf)]
  parameters = _parameters(fun)
  names = [_name(paths[i][0], parameters) for i in places]
  inputs = [leaves[i] for i in places]
  for name, leaf in zip(names, inputs, strict=True):
    _check_input(caller, name, leaf, shapes)
  if not shapes and isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(f"{caller} must be called outside jit, {_ON_THE_HOST}.")

  def flat_fun(*traced: Any) -> list[Any]:
    filled = list(leaves)
    for i, x in zip(places, traced, strict=True):
      filled[i] = x
    its_args, its_kwargs = jax.tree.unflatten(structure, filled)
    out = fun(*its_args, **its_kwargs)
    named = [(i, *leaf) for i, x in enumerate(_parts(out)) for leaf in x]
    groups[:] = [i for i, _, _ in named]
    results[:] = [name for _, name, _ in named]
    return [leaf for _, _, leaf in named]

  results: list[str] = []
  groups: list[int] = []
  closed = jax.make_jaxpr(flat_fun)(*inputs)
  return Traced(closed, inputs, names, results, groups)


def _parts(out: Any, name: str = "") -> list[list[tuple[str, Any]]]:
  """The named floats of each result, such as those of loss and gradients."""
  if type(out) is tuple:
    parts = [_parts(x, f"{name}[{i}]") for i, x in enumerate(out)]
    return [part for several in parts for part in several]
  return [
    [
      (f"{name}{jax.tree_util.keystr(path)}", leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(out)
      if _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)
    ]
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
  return is_numpy and _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


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
  positional = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
  )
  return [p.name for p in parameters if p.kind in positional]


def _name(path: Any, parameters: list[str]) -> str:
  """How the user would write the way to an argument's leaf."""
  # The path begins with 0 for the positional arguments and 1 for the others.
  kind, which, *rest = path
  if kind.idx == 1:
    name = which.key
  elif which.idx < len(parameters):
    name = parameters[which.idx]
  else:
    name = f"args[{which.idx}]"
  return f"{name}{jax.tree_util.keystr(tuple(rest))}"
