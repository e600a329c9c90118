"""The jaxpr of a function, whatever its arguments are.

Beside what a function returns, a training step holds what it trains on: the
gradients that `update` is given. They are marked, and become outputs here, so
that every report sees them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import contextlib
import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays, _checks, _named_values
from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _outputs,
  _powers,
  _types,
)

_NOT_SCALED = (
  "The gradients that update is given come from no scaled loss: differentiate"
  " with ols.value_and_grad(loss_fn, opt_state), unless the scale is fixed at"
  " 1."
)
_TWICE = (
  "The gradients that update is given were unscaled twice: value_and_grad and"
  " grad return true gradients, which need no unscale_grads and no"
  " grads_are_scaled=True."
)
_NEVER = (
  "The gradients that update is given were never unscaled: call unscale_grads,"
  " or make the optimizer with grads_are_scaled=True."
)
_HIDDEN = (
  "Something between hides an overflow from update: the gradients that were"
  " computed are not finite, and those that update is given are. So the step is"
  " applied to what is left, and the loss scale never comes down. Give update"
  " the gradients as they are."
)
# How a state of the loss scale among the arguments is written.
_LOSS_SCALE = re.compile(r"\.loss_scale(\.value|\[.*\])?$")


class Output(NamedTuple):
  """An output of a traced function.

  Attributes:
    kind: a ``"result"``; an ``"argument"`` that was changed in place; or what
      is marked: the ``"grads"`` that `update` is given, the ``"updates"``, and
      whether a step is ``"applied"``, as 1, 0, or -1 if `update` did not run;
      and of ``"unscaled"`` gradients a number that is finite if they are.
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
    unreached: where gradients are that could not be made outputs, as in a
      ``while``.
    in_branches: where branches are that may not be taken, and hold gradients.
    warnings: what is wrong with how the gradients are scaled, in sentences.
  """

  closed: _equations.ClosedJaxpr
  inputs: list[Any]
  names: list[str]
  outputs: list[Output]
  unreached: list[str]
  in_branches: list[str]
  warnings: list[str]

  @property
  def grads(self) -> list[Output]:
    """The gradients that an optimizer is given."""
    return [output for output in self.outputs if output.kind == "grads"]

  def of_kind(self, outs: Sequence[Any], kind: str) -> list[Any]:
    """Those of its outputs that are of this kind."""
    pairs = zip(outs, self.outputs, strict=True)
    return [x for x, output in pairs if output.kind == kind]

  def only(self, kinds: Collection[str]) -> "Traced":
    """The same function without all other outputs."""
    kept = [i for i, out in enumerate(self.outputs) if out.kind in kinds]
    outvars = [self.closed.jaxpr.outvars[i] for i in kept]
    closed: Any = _equations.with_fields(self.closed, outvars=outvars)
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
  leaves, structure = jax.tree.flatten((args, kwargs))
  arguments = _named_arguments(fun, args, kwargs)
  names = [name for name, leaf in arguments if _is_input(leaf)]
  inputs = [_input_of(leaf) for leaf in leaves if _is_input(leaf)]
  _check_inputs(caller, names, inputs, shapes)
  outputs: list[Output] = []

  def flat_fun(*traced: Any) -> list[Any]:
    arrays = iter(traced)
    filled = [
      _as_argument(leaf, next(arrays)) if _is_input(leaf) else leaf
      for leaf in leaves
    ]
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
      found += [
        (Output("argument", name, 0), ref[...])
        for (name, _), ref in zip(arguments, filled, strict=True)
        if _is_ref(ref) and _is_float(ref)
      ]
    outputs[:] = [output for output, _ in found]
    return [leaf for _, leaf in found]

  try:
    closed = jax.make_jaxpr(flat_fun)(*inputs)
  except ValueError as error:
    # Of a jit with such options JAX makes no part of another program.
    within = getattr(fun, "__wrapped__", None)
    if within is None or "compiler_options" not in str(error):
      raise
    fun = within
    closed = jax.make_jaxpr(flat_fun)(*inputs)
  program = _outputs.with_named_outputs(closed, _look_at)
  _check_constants(program.closed)
  outputs += _judged_outputs(program.names)
  return Traced(
    program.closed,
    inputs,
    names,
    outputs,
    program.unreached,
    program.in_branches,
    scaling_of(program.closed, names),
  )


def _look_at(name: str) -> Callable[[Any], Any] | None:
  """What is looked at of a value with a mark."""
  mark = _named_values.mark_of(name)
  if mark is None or mark.kind == "scale":
    return None
  looks = {"applied": lambda x: x.astype(jnp.int8), "unscaled": _fault}
  return looks.get(mark.kind, lambda x: x)


def _fault(x: jax.Array) -> jax.Array:
  """A number that is finite if an array is, however many are looked at."""
  bad = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(bad).astype(jnp.float32)


def _judged_outputs(names: list[str]) -> list[Output]:
  """What is marked, by the way to it; several updates have a number each."""
  groups: dict[str, int] = {}
  last: dict[str, int] = {}
  outputs = []
  for kind, number, path in filter(None, map(_named_values.mark_of, names)):
    kind = kind.removeprefix("scaled_")
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


def told(unreached: list[str]) -> list[str]:
  """What is told of gradients that could not be made outputs."""
  return [
    f"gradients inside of {where}: hand over one step"
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
      "fun must be given its Refs as arguments, got one that it closes over: to"
      " run it would change that, and of an argument a copy is taken."
    )


def _check_scans(caller: str, closed: _equations.ClosedJaxpr) -> None:
  is_there = _higher_order.holds_scan_of_hijax(closed)
  if is_there and _higher_order.jit_drops_scans():
    raise RuntimeError(
      f"jax.jit of JAX {jax.__version__} drops scans if the flag jax_scan3 is"
      f" on, so that {caller} would look at a program without them. Turn the"
      ' flag off: jax.config.update("jax_scan3", False), or unset JAX_SCAN3.'
    )


def _check_callable(caller: str, fun: Any) -> None:
  if isinstance(fun, jax.stages.Compiled):
    raise TypeError(
      "fun must be a function that can be traced, got one that is compiled:"
      " hand over the jitted function, without .lower(...).compile()."
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


def scaling_of(
  closed: _equations.ClosedJaxpr, names: Sequence[str]
) -> list[str]:
  """What is wrong with how the gradients of a step are scaled, if it is known.

  Args:
    closed: the jaxpr of the step.
    names: how its inputs are named.

  Returns:
    Sentences; none if nothing is wrong, or if it cannot be known, as of
    gradients that are arguments.
  """
  told: dict[str, None] = {}

  def named(name: str, power: _powers.Power) -> _powers.Power:
    mark = _named_values.mark_of(name)
    if mark is None:
      return power
    if mark.kind == "scale":
      return _powers.Power(1)
    if mark.kind in ("grads", "scaled_grads"):
      told.update(dict.fromkeys(_mistake(power, mark.kind == "scaled_grads")))
      return _powers.Power()  # What follows is another step.
    return power

  inputs = [
    _powers.Power(1 if _LOSS_SCALE.search(name) else 0) for name in names
  ]
  _powers.powers_of(closed, inputs, named)
  return list(told)


def _mistake(power: _powers.Power, is_scaled: bool) -> list[str]:
  """What is wrong with a gradient; nothing if it is right, or not known."""
  if not power.is_gradient or not isinstance(power.exponent, int):
    return []
  if not power.is_scaled and power.exponent <= 0:
    return [_NOT_SCALED]
  over = power.exponent - is_scaled
  return [_NEVER] if over > 0 else [_TWICE] if over < 0 else []


def running(flags: Sequence[Any], faults: Sequence[Any]) -> list[str]:
  """What a step that was run tells: did ``update`` run, and did it see all.

  Args:
    flags: for each ``update``, whether it was applied: 1, 0, or -1 if it did
      not run; an array where it stands in a loop, or on several devices.
    faults: for what was unscaled, a number that is not finite if it is not.

  Returns:
    Sentences; none if all is well.
  """
  flags = [np.asarray(flag) for flag in flags]
  if not flags:
    return []
  told = []
  count = sum(flag.size for flag in flags)
  missed = sum(int(np.sum(flag < 0)) for flag in flags)
  if missed:
    often = "" if missed == count else f" {missed} times of {count}"
    told.append(f"update did not run{often} in this step.")
  # Iteration by iteration, if all stand in the same loops.
  shapes = {flag.shape for flag in flags}
  shape = shapes.pop() if len(shapes) == 1 else ()
  sees_all = np.ones(shape, bool)
  for flag in flags:
    sees_all &= _over_the_rest(np.all, flag == 1, shape)
  overflows = np.zeros(shape, bool)
  for fault in faults:
    overflows |= _over_the_rest(np.any, ~np.isfinite(np.asarray(fault)), shape)
  return [*told, _HIDDEN] if (overflows & sees_all).any() else told


def _over_the_rest(reduce: Any, x: np.ndarray, shape: tuple[int, ...]) -> Any:
  """The array reduced to its first axes, if these have the shape."""
  first = len(shape) if x.shape[: len(shape)] == shape else 0
  return reduce(x, axis=tuple(range(first, x.ndim)))
