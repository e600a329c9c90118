"""The jaxpr of a function, whatever its arguments are.

Beside what a function returns, a training step holds what it trains on: the
gradients that `update` is given. They are marked, and become outputs here, so
that every report sees them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import contextlib
import functools
import inspect
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import (
  _arrays,
  _checks,
  _flattening,
  _named_values,
  _paths,
)
from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _outputs,
  _types,
)
from optax_lossscale.diagnostics import _step_checks


class Traced(NamedTuple):
  """A traced function.

  Attributes:
    closed: its jaxpr.
    inputs: the arrays, or their shapes, that the jaxpr takes.
    names: how to name each of them, such as ``batch['image']``.
    outputs: what each output of the jaxpr is. All but ``"applied"`` are floats.
    unreached: where gradients are that could not be made outputs, as in a
      ``while``.
    in_branches: where branches are that may not be taken, and hold gradients.
    scales: which inputs are loss scales, by their positions.
    mistakes: in how the gradients are scaled.
  """

  closed: _equations.ClosedJaxpr
  inputs: list[Any]
  names: list[str]
  outputs: list[_step_checks.Output]
  unreached: list[str]
  in_branches: list[str]
  scales: frozenset[int]
  mistakes: list[_step_checks.Mistake]

  @property
  def grads(self) -> list[_step_checks.Output]:
    """The gradients that an optimizer is given."""
    return [output for output in self.outputs if output.kind == "grads"]

  def of_kind(self, outs: Sequence[Any], kind: str) -> list[Any]:
    """Those of its outputs that are of this kind."""
    pairs = zip(outs, self.outputs, strict=True)
    return [x for x, output in pairs if output.kind == kind]

  def only_kinds(self, kinds: Collection[str]) -> "Traced":
    """The same function without outputs of other kinds."""
    return self.only([out.kind in kinds for out in self.outputs])

  def only(self, selected: Sequence[bool]) -> "Traced":
    """The same function without all other outputs."""
    kept = list(itertools.compress(range(len(self.outputs)), selected))
    outvars = [self.closed.jaxpr.outvars[i] for i in kept]
    closed: Any = _equations.replace_jaxpr_fields(self.closed, outvars=outvars)
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

  Raises:
    RuntimeError: if JAX compiles another program than the one that is written.
    TypeError: as :func:`trace` does.
  """
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    traced = trace(caller, fun, args, kwargs, shapes=False)
    _check_scans(caller, traced.closed)
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
  keywords = sorted(kwargs)  # in the order in which JAX flattens them
  arguments = [*args, *(kwargs[name] for name in keywords)]
  argument_names = [*_positional_names(fun, len(args)), *keywords]
  flatten = lambda trees: _flattening.flatten_named_trees(
    list(zip(argument_names, trees, strict=True))
  )
  flat = flatten(arguments)
  is_input = list(map(_is_input, flat.leaves))
  names = list(itertools.compress(flat.names, is_input))
  inputs = list(map(_input_of, itertools.compress(flat.leaves, is_input)))
  _check_inputs(caller, names, inputs, shapes)
  outputs: list[_step_checks.Output] = []

  def flat_fun(*traced: Any) -> list[Any]:
    arrays = iter(traced)
    filled = [
      _as_argument(leaf, next(arrays)) if _is_input(leaf) else leaf
      for leaf in flat.leaves
    ]
    trees = flat.unflatten(filled)
    its_kwargs = dict(zip(keywords, trees[len(args) :], strict=True))
    found = _floats_in(fun(*trees[: len(args)], **its_kwargs))
    # Flax NNX changes models and optimizers in place.
    after = flatten(trees)
    if after.structure == flat.structure:
      found += [
        (_step_checks.Output("argument", name, 0), new)
        for name, old, new in zip(flat.names, filled, after.leaves, strict=True)
        if new is not old and _is_float(new)
      ]
      found += [
        (_step_checks.Output("argument", name, 0), ref[...])
        for name, ref in zip(flat.names, filled, strict=True)
        if _is_ref(ref) and _is_float(ref)
      ]
    outputs[:] = [output for output, _ in found]
    return [leaf for _, leaf in found]

  try:
    with _keeping_attributes(caller, fun):
      closed = jax.make_jaxpr(flat_fun)(*inputs)
  except Exception as error:
    if type(error).__name__ == "TraceContextError":  # of Flax, if it is there
      raise TypeError(_bound_message(caller, fun)) from error
    # Of a jit with such options JAX makes no part of another program.
    within = getattr(fun, "__wrapped__", None)
    if within is None or "compiler_options" not in str(error):
      raise
    fun = within
    closed = jax.make_jaxpr(flat_fun)(*inputs)
  program = _outputs.harvest_tagged_values(closed, _look_at, _is_unscaled)
  _check_constants(program.closed_jaxpr)
  outputs += _judged_outputs(program.tagged_values)
  dependence = _step_checks.check_dependence(
    program.closed_jaxpr, names, outputs
  )
  traced = Traced(
    program.closed_jaxpr,
    inputs,
    names,
    dependence.outputs,
    program.unreached_labels,
    program.cond_labels,
    dependence.scales,
    dependence.mistakes,
  )
  return traced.only(dependence.is_relevant)


@contextlib.contextmanager
def _keeping_attributes(caller: str, fun: Any) -> Iterator[None]:
  """Restores the attributes of an object whose method writes tracers to it."""
  owner = fun.__self__ if inspect.ismethod(fun) else None
  attributes = getattr(owner, "__dict__", {})
  before = dict(attributes)
  yield
  is_tracer = lambda x: isinstance(x, jax.core.Tracer)
  leaked = [
    name
    for name, value in attributes.items()
    if any(map(is_tracer, jax.tree.leaves(value)))
  ]
  if leaked:
    attributes.clear()
    attributes.update(before)
    name = f"{type(owner).__name__}.{fun.__name__}"
    raise TypeError(
      f"fun must return the arrays that it computes, got {name}, which writes"
      f" them to self.{leaked[0]}. Pass the function that it calls:"
      f" {caller}(train_step, params, opt_state, batch)."
    )


def _look_at(name: str) -> Callable[[Any], Any] | None:
  """What is looked at of a value with a mark."""
  mark = _named_values.parse_tag(name)
  if mark is None or mark.kind.endswith("scale"):
    return None
  looks = {"applied": lambda x: x.astype(jnp.int8), "unscaled": _fault}
  return looks.get(mark.kind, lambda x: x)


def _is_unscaled(name: str) -> bool:
  """Whether a tag is that of gradients, which `update` receives later."""
  mark = _named_values.parse_tag(name)
  return mark is not None and mark.kind == "unscaled"


def _fault(x: jax.Array) -> jax.Array:
  """A number that is finite if an array is, however many are looked at."""
  bad = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(bad).astype(jnp.float32)


def _judged_outputs(
  named: list[_outputs.TaggedValue],
) -> list[_step_checks.Output]:
  """What is marked, by the way to it; several updates have a number each."""
  groups: dict[str, int] = {}
  last: dict[str, int] = {}
  outputs = []
  for name, branches in named:
    mark = _named_values.parse_tag(name)
    assert mark is not None  # Others are not looked at.
    kind = mark.kind.removeprefix("scaled_")
    if mark.leaf_index <= last.get(
      kind, mark.leaf_index
    ):  # Another update begins.
      groups[kind] = groups.get(kind, -1) + 1
    last[kind] = mark.leaf_index
    outputs.append(_step_checks.Output(kind, mark.path, groups[kind], branches))
  return [
    out._replace(name=f"[{out.group}]/{out.name}") if groups[out.kind] else out
    for out in outputs
  ]


def _positional_names(fun: Callable[..., Any], count: int) -> list[str]:
  """How to name each positional argument."""
  names = _parameters(fun)[:count]
  return names + [f"args[{i}]" for i in range(len(names), count)]


def _floats_in(out: Any) -> list[tuple[_step_checks.Output, Any]]:
  """The floats in what a function returns, such as the loss, or gradients."""
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  leaves = [
    (i, (*outer, *inner), leaf)
    for i, (outer, result) in enumerate(results)
    for inner, leaf in jax.tree_util.tree_leaves_with_path(result)
  ]
  names = _paths.leaf_names(path for _, path, _ in leaves)
  return [
    (_step_checks.Output("result", name, i), leaf)
    for name, (i, _, leaf) in zip(names, leaves, strict=True)
    if _is_float(leaf)
  ]


def _is_float(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


def told(unreached: list[str]) -> list[str]:
  """What is told of gradients that could not be made outputs."""
  return [
    f"gradients inside {where}: pass a single step instead"
    for where in dict.fromkeys(unreached)
  ]


def _is_input(leaf: Any) -> bool:
  if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or _is_ref(leaf):
    return True
  # Integers of numpy may be sizes and indices that must be known.
  is_numpy = isinstance(leaf, (np.ndarray, np.generic))
  return is_numpy and _arrays.is_inexact(leaf)


def _is_ref(x: Any) -> bool:
  return hasattr(x, "dtype") and _types.is_ref(getattr(x, "aval", None))


def _input_of(leaf: Any) -> Any:
  """The array of an argument; of a Ref, what it holds now."""
  return leaf[...] if _is_ref(leaf) else leaf


def _as_argument(leaf: Any, array: Any) -> Any:
  """What the function is given: of a Ref a copy, since it may be changed."""
  return jax.new_ref(array) if _is_ref(leaf) else array


def _check_constants(closed: _equations.ClosedJaxpr) -> None:
  if any(map(_is_ref, closed.consts)):
    raise TypeError(
      "fun closes over a jax.Ref, so running fun would change it. Pass the Ref"
      " as an argument, since arguments are copied."
    )


def _bound_message(caller: str, fun: Any) -> str:
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"{name} changes Flax NNX objects that are not arguments: {name} closes"
    " over them, or nnx.cached_partial binds them. Write"
    f" {caller}({name}, model, optimizer, batch), with the function before"
    " nnx.cached_partial."
  )


def _check_scans(caller: str, closed: _equations.ClosedJaxpr) -> None:
  is_there = _higher_order.has_hijax_scan(closed)
  if is_there and _higher_order.is_scan_dropped_by_jit():
    raise RuntimeError(
      f"jax.jit of JAX {jax.__version__} drops scans if the flag jax_scan3 is"
      f" on, so {caller} would analyze a program without the scans. Turn the"
      ' flag off: jax.config.update("jax_scan3", False), or unset JAX_SCAN3.'
    )


def _check_callable(caller: str, fun: Any) -> None:
  if isinstance(fun, jax.stages.Compiled):
    raise TypeError(
      "fun must be a function that can be traced, got a compiled function. Pass"
      " the jitted function, without .lower(...).compile()."
    )
  hint = f" Write {caller}(fun, *args), not {caller}(fun(*args))."
  _checks.check_callable("fun", fun, hint=hint)


def _check_inputs(
  caller: str, names: list[str], inputs: list[Any], shapes: bool
) -> None:
  outside = f"{caller} must be called outside jit, since it runs on the host"
  for name, leaf in zip(names, inputs, strict=True):
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(f"{outside}, got a tracer at {name}.")
    if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
      raise TypeError(
        f"{caller} needs concrete arrays, got {leaf} at {name}. Pass arrays."
        " Only precision_report accepts shapes."
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
