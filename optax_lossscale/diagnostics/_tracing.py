"""The jaxpr of a function, whatever its arguments are.

Beside what a function returns, a training step holds what it trains on: the
gradients that `update` is given. They are marked, and become outputs here, so
that every report sees them.
"""

from collections.abc import Callable, Collection, Iterator
import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _jaxprs, _judged


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: a ``"result"``; an ``"argument"`` that was changed in place; or what
      `update` judges: ``"grads"``, ``"updates"``, and whether a step is
      ``"applied"``.
    name: how to name it, such as ``[1]['kernel']``.
    group: the number of the result that it is part of, or of the ``update``.
  """

  kind: str
  name: str
  group: int


class Traced(NamedTuple):
  """A traced function.

  Attributes:
    closed: its jaxpr.
    inputs: the arrays, or their shapes, that the jaxpr takes.
    names: how to name each of them, such as ``batch['image']``.
    outputs: what each output of the jaxpr is. All but ``"applied"`` are floats.
    shut: where gradients are that could not be made outputs, as in a ``while``.
  """

  closed: _jaxprs.ClosedJaxpr
  inputs: list[Any]
  names: list[str]
  outputs: list[Output]
  shut: list[str]

  @property
  def grads(self) -> list[Output]:
    """The gradients that an optimizer is given."""
    return [output for output in self.outputs if output.kind == "grads"]

  def only(self, kinds: Collection[str]) -> "Traced":
    """The same function without all other outputs."""
    kept = [i for i, out in enumerate(self.outputs) if out.kind in kinds]
    outvars = [self.closed.jaxpr.outvars[i] for i in kept]
    closed: Any = _jaxprs.with_fields(self.closed, outvars=outvars)
    outputs = [self.outputs[i] for i in kept]
    return self._replace(closed=closed, outputs=outputs)


@contextlib.contextmanager
def traced_on_host(
  caller: str, fun: Callable[..., Any], args: Any, kwargs: Any
) -> Iterator[Traced]:
  """Traces a function, and lets it run: be it finite or not, and as compiled.

  Args:
    caller: the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.

  Yields:
    What :func:`trace` returns.
  """
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    traced = trace(caller, fun, args, kwargs, shapes=False)
    with _mesh_of(traced.inputs):
      yield traced


def _mesh_of(arrays: list[Any]) -> contextlib.AbstractContextManager[Any]:
  """The mesh that an operation without inputs would have in a ``jit``."""
  for array in arrays:
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    types = getattr(mesh, "axis_types", ())
    if jax.sharding.AxisType.Explicit in types:
      return jax.set_mesh(mesh)
  return contextlib.nullcontext()


def trace(
  caller: str,
  fun: Callable[..., Any],
  args: Any,
  kwargs: Any,
  *,
  shapes: bool,
) -> Traced:
  """Traces a function once. Its arrays become inputs of the jaxpr.

  Numbers, functions and the static parts of a model stay as they are.

  Args:
    caller: the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.
    shapes: whether shapes are enough.

  Returns:
    A :class:`Traced`.

  Raises:
    TypeError: if ``fun`` is not callable; if an argument is traced; or, where
      arrays are needed, if one is a shape, or under ``jit``.
  """
  _check_callable(caller, fun)
  # Trainers bind their model, which Flax NNX changes in place: what is bound is
  # an argument, too.
  while isinstance(fun, functools.partial):
    args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
    fun = fun.func
  leaves, structure = jax.tree.flatten((args, kwargs))
  arguments = _named_arguments(fun, args, kwargs)
  names = [name for name, leaf in arguments if _is_input(leaf)]
  inputs = [leaf for leaf in leaves if _is_input(leaf)]
  _check_inputs(caller, names, inputs, shapes)
  outputs: list[Output] = []

  def flat_fun(*traced: Any) -> list[Any]:
    arrays = iter(traced)
    filled = [next(arrays) if _is_input(leaf) else leaf for leaf in leaves]
    its_args, its_kwargs = jax.tree.unflatten(structure, filled)
    found = _floats_in(fun(*its_args, **its_kwargs))
    # Flax NNX changes models and optimizers in place.
    after, now = jax.tree.flatten((its_args, its_kwargs))
    if now == structure:  # type: ignore[operator]
      found += [
        (Output("argument", name, 0), new)
        for (name, _), old, new in zip(arguments, filled, after, strict=True)
        if new is not old and _is_float(new)
      ]
    outputs[:] = [output for output, _ in found]
    return [leaf for _, leaf in found]

  closed = jax.make_jaxpr(flat_fun)(*inputs)
  is_mark = lambda name: _judged.mark_of(name) is not None
  opened = _jaxprs.with_named_outputs(closed, is_mark)
  outputs += _judged_outputs(opened.names)
  return Traced(opened.closed, inputs, names, outputs, opened.shut)


def _judged_outputs(names: list[str]) -> list[Output]:
  """What is marked, by the way to it; several updates have a number each."""
  groups: dict[str, int] = {}
  last: dict[str, int] = {}
  outputs = []
  for kind, number, path in filter(None, map(_judged.mark_of, names)):
    if number <= last.get(kind, number):  # Another update begins.
      groups[kind] = groups.get(kind, -1) + 1
    last[kind] = number
    outputs.append(Output(kind, path, groups[kind]))
  return [
    out._replace(name=f"[{out.group}]{out.name}") if groups[out.kind] else out
    for out in outputs
  ]


def _named_arguments(
  fun: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[str, Any]]:
  """The leaves of the arguments, by how a user would write the way to them."""
  names = _parameters(fun)[: len(args)]
  names += [f"args[{i}]" for i in range(len(names), len(args))]
  # Keyword arguments stand in the order in which JAX flattens them.
  arguments = [*zip(names, args, strict=True), *sorted(kwargs.items())]
  return [leaf for argument in arguments for leaf in _named_leaves(*argument)]


def _floats_in(out: Any) -> list[tuple[Output, Any]]:
  """The floats in what a function returns, such as the loss, or gradients."""
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  return [
    (Output("result", name, i), leaf)
    for i, (path, result) in enumerate(results)
    for name, leaf in _named_leaves(jax.tree_util.keystr(path), result)
    if _is_float(leaf)
  ]


def _is_float(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


def _named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree that has this name, by the way to them."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [
    (f"{name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves
  ]


def told(shut: list[str]) -> list[str]:
  """What is told of gradients that could not be made outputs."""
  return [
    f"gradients inside of {where}: hand over one step"
    for where in dict.fromkeys(shut)
  ]


def _is_input(leaf: Any) -> bool:
  if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
    return True
  # Integers of numpy may be sizes and indices that must be known.
  is_numpy = isinstance(leaf, (np.ndarray, np.generic))
  return is_numpy and _arrays.is_inexact(leaf)


def _check_callable(caller: str, fun: Any) -> None:
  if not callable(fun):
    raise TypeError(
      f"fun must be a function, got fun = {fun!r}. Write {caller}(fun, *args),"
      f" not {caller}(fun(*args))."
    )


def _check_inputs(
  caller: str, names: list[str], inputs: list[Any], shapes: bool
) -> None:
  outside = f"{caller} must be called outside jit, since it runs on the host"
  for name, leaf in zip(names, inputs, strict=True):
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(f"{outside}, got a tracer at {name}.")
    if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
      raise TypeError(
        f"{caller} needs arrays, since it computes with them, got {leaf} at"
        f" {name}. Only precision_report is content with shapes."
      )
  if not shapes and isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(f"{outside}.")


def _parameters(fun: Callable[..., Any]) -> list[str]:
  """The names of the positional parameters, as far as they are known."""
  try:
    parameters = inspect.signature(fun).parameters.values()
  except (TypeError, ValueError):
    return []
  # The two kinds of these come first in the order of all kinds.
  return [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
