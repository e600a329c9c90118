"""Trace a function with any arguments to a jaxpr with all outputs to check.

Arrays in the arguments become inputs of the jaxpr, and the float results become
its outputs. Three kinds of values that a training step need not return become
outputs, too, so that every report sees them: the gradients that ``update``
receives and those that ``value_and_grad`` returns, which have a tag (a
``checkpoint_name``, see ``_tags``); and arrays that the function changes in its
arguments, such as a model of Flax NNX.
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
  _paths,
  _tags,
)
from optax_lossscale._jaxprs import (
  _avals,
  _eqns,
  _harvest,
  _higher_order,
)
from optax_lossscale.diagnostics import _progress, _scaling_mistakes


class TracedFunction(NamedTuple):
  """A traced function.

  Attributes:
    closed_jaxpr: its jaxpr.
    inputs: the arrays, or their shapes, that the jaxpr takes.
    input_names: the name of each input, such as ``batch['image']``.
    outputs: the description of each output of the jaxpr. All outputs except
      ``"applied"`` are floats.
    unreached_locations: the locations of gradients that could not become
      outputs, such as those in a ``while_loop``.
    cond_branch_locations: the locations of ``cond`` branches with gradients,
      which may not be taken.
    scale_indices: the indices of the inputs that are loss scales.
    mistakes: mistakes in how the gradients are scaled.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  inputs: list[Any]
  input_names: list[str]
  outputs: list[_scaling_mistakes.Output]
  unreached_locations: list[str]
  cond_branch_locations: list[str]
  scale_indices: frozenset[int]
  mistakes: list[_scaling_mistakes.Mistake]

  @property
  def grad_outputs(self) -> list[_scaling_mistakes.Output]:
    """The gradients that an optimizer receives."""
    return [output for output in self.outputs if output.kind == "grads"]

  def select_kind(self, outs: Sequence[Any], kind: str) -> list[Any]:
    """Return the values of the outputs of one kind."""
    pairs = zip(outs, self.outputs, strict=True)
    return [x for x, output in pairs if output.kind == kind]

  def restrict_to_kinds(self, kinds: Collection[str]) -> "TracedFunction":
    """Return the function without the outputs of other kinds."""
    return self.restrict_outputs([out.kind in kinds for out in self.outputs])

  def restrict_outputs(self, output_mask: Sequence[bool]) -> "TracedFunction":
    """Return the function with only the outputs in the mask."""
    indices = list(itertools.compress(range(len(self.outputs)), output_mask))
    outvars = [self.closed_jaxpr.jaxpr.outvars[i] for i in indices]
    closed_jaxpr: Any = _eqns.replace_jaxpr_fields(
      self.closed_jaxpr, outvars=outvars
    )
    outputs = [self.outputs[i] for i in indices]
    return self._replace(closed_jaxpr=closed_jaxpr, outputs=outputs)


@contextlib.contextmanager
def trace_on_host(
  caller: str,
  fun: Callable[..., Any],
  args: Any,
  kwargs: Any,
  *,
  progress: bool,
) -> Iterator[tuple[TracedFunction, _progress.ProgressLine]]:
  """Trace a function, and set the context in which to run its jaxpr.

  In the context, JAX does not raise on NaN or inf, and ``jit`` is enabled. The
  progress line also covers the tracing.

  Args:
    caller: the name of the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.
    progress: whether to write a progress line.

  Yields:
    The :class:`TracedFunction`, and the progress line.

  Raises:
    RuntimeError: if JAX compiles another program than it traces.
    TypeError: see :func:`trace`.
  """
  with (
    _progress.ProgressLine(
      caller, progress
    ).refresh_in_background() as progress_line,
    jax.debug_nans(False),
    jax.debug_infs(False),
    jax.disable_jit(False),
  ):
    traced = trace(caller, fun, args, kwargs, allow_abstract=False)
    _check_no_dropped_scans(caller, traced.closed_jaxpr)
    with _set_explicit_mesh(traced.inputs):
      yield traced, progress_line


def _set_explicit_mesh(
  arrays: list[Any],
) -> contextlib.AbstractContextManager[Any]:
  """Return a context that sets the explicit mesh of the arrays, if any.

  Under ``jit``, an eqn without inputs, such as ``iota``, has the mesh of the
  arguments. An interpreter must set the mesh for it.
  """
  for array in arrays:
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    axis_types = getattr(mesh, "axis_types", ())
    if jax.sharding.AxisType.Explicit in axis_types:
      return jax.set_mesh(mesh)
  return contextlib.nullcontext()


def trace(
  caller: str,
  fun: Callable[..., Any],
  args: Any,
  kwargs: Any,
  *,
  allow_abstract: bool,
) -> TracedFunction:
  """Trace a function once, with its arrays as inputs of the jaxpr.

  Numbers, functions and the static parts of a model are not traced.

  Args:
    caller: the name of the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.
    allow_abstract: whether arguments may be ``jax.ShapeDtypeStruct``.

  Returns:
    A :class:`TracedFunction`.

  Raises:
    TypeError: if ``fun`` is not callable; if an argument is traced; or, unless
      ``allow_abstract``, if an argument is a shape, or under ``jit``.
  """
  _check_callable(caller, fun)
  fun, args, kwargs = _unwrap_partials(fun, args, kwargs)
  kwarg_names = sorted(kwargs)  # in the order in which JAX flattens them
  arg_trees = [*args, *(kwargs[name] for name in kwarg_names)]
  arg_names = [*_get_positional_names(fun, len(args)), *kwarg_names]
  flatten = lambda trees: _flattening.flatten_named_trees(
    list(zip(arg_names, trees, strict=True))
  )
  flat_args = flatten(arg_trees)
  input_mask = list(map(_is_input, flat_args.leaves))
  input_names = list(itertools.compress(flat_args.names, input_mask))
  inputs = list(
    map(_as_input, itertools.compress(flat_args.leaves, input_mask))
  )
  _check_inputs(caller, input_names, inputs, allow_abstract)
  outputs: list[_scaling_mistakes.Output] = []

  def call_flat(fun: Callable[..., Any], *tracers: Any) -> list[Any]:
    arrays = iter(tracers)
    call_leaves = [
      _as_call_leaf(leaf, next(arrays)) if _is_input(leaf) else leaf
      for leaf in flat_args.leaves
    ]
    call_trees = flat_args.unflatten(call_leaves)
    call_kwargs = dict(zip(kwarg_names, call_trees[len(args) :], strict=True))
    output_pairs = _collect_float_results(
      fun(*call_trees[: len(args)], **call_kwargs)
    )
    flat_after_call = flatten(call_trees)
    if flat_after_call.structure == flat_args.structure:
      output_pairs += _collect_changed_arguments(
        flat_args.names, call_leaves, flat_after_call.leaves
      )
    # The descriptions are Python objects, which a traced function cannot
    # return. The list is overwritten if the function is traced a second time.
    outputs[:] = [output for output, _ in output_pairs]
    return [leaf for _, leaf in output_pairs]

  trace_fun = lambda fun: jax.make_jaxpr(functools.partial(call_flat, fun))(
    *inputs
  )
  closed_jaxpr = _trace_or_unwrap(caller, fun, trace_fun)
  harvest = _harvest.harvest_tagged_values(
    closed_jaxpr, _get_capture_fn, _is_unscaled_tag
  )
  # A Ref in the arguments is copied, but one in a closure would be mutated.
  _check_no_ref_consts(harvest.closed_jaxpr)
  outputs += _as_outputs(harvest.tagged_values)
  dependence = _scaling_mistakes.check_dependence(
    harvest.closed_jaxpr, input_names, outputs
  )
  traced = TracedFunction(
    harvest.closed_jaxpr,
    inputs,
    input_names,
    dependence.outputs,
    harvest.unreached_labels,
    harvest.cond_labels,
    dependence.scale_indices,
    dependence.mistakes,
  )
  # Drop unscaled gradients that reach no update, such as those of a metric.
  return traced.restrict_outputs(dependence.relevant_mask)


def _unwrap_partials(
  fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], Any, Any]:
  """Return the function inside of partials, and all of its arguments.

  Trainers bind their model with a partial, and Flax NNX changes the model in
  place, so bound arguments are checked like other arguments.
  """
  while isinstance(fun, functools.partial):
    args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
    fun = fun.func
  return fun, args, kwargs


def _collect_changed_arguments(
  names: list[str], leaves: list[Any], leaves_after_call: list[Any]
) -> list[tuple[_scaling_mistakes.Output, Any]]:
  """Return the float arrays that a function changed in its arguments.

  Flax NNX changes models and optimizers in place: their arrays are other
  objects after the call. A Ref is the same object, and always included.
  """
  new_arrays = [
    (name, new)
    for name, old, new in zip(names, leaves, leaves_after_call, strict=True)
    if new is not old and _is_float_array(new)
  ]
  ref_arrays = [
    (name, ref[...])
    for name, ref in zip(names, leaves, strict=True)
    if _is_ref(ref) and _is_float_array(ref)
  ]
  return [
    (_scaling_mistakes.Output("argument", name, 0), array)
    for name, array in new_arrays + ref_arrays
  ]


def _trace_or_unwrap(
  caller: str,
  fun: Callable[..., Any],
  trace_fun: Callable[[Callable[..., Any]], _eqns.ClosedJaxpr],
) -> _eqns.ClosedJaxpr:
  """Trace a function, or the function inside of a jit with compiler options.

  JAX refuses to trace a jit with compiler options as a part of another program.
  """
  try:
    with _restore_attributes(caller, fun):
      return trace_fun(fun)
  except Exception as error:
    # An error of Flax, matched by name since Flax may not be installed.
    if type(error).__name__ == "TraceContextError":
      raise TypeError(_closed_over_message(caller, fun)) from error
    unwrapped_fun = getattr(fun, "__wrapped__", None)
    if unwrapped_fun is None or "compiler_options" not in str(error):
      raise
    return trace_fun(unwrapped_fun)


@contextlib.contextmanager
def _restore_attributes(caller: str, fun: Any) -> Iterator[None]:
  """Raise if a method writes tracers to its object, and restore the object."""
  owner = fun.__self__ if inspect.ismethod(fun) else None
  attributes = getattr(owner, "__dict__", {})
  saved_attributes = dict(attributes)
  yield
  is_tracer = lambda x: isinstance(x, jax.core.Tracer)
  leaked_names = [
    name
    for name, value in attributes.items()
    if any(map(is_tracer, jax.tree.leaves(value)))
  ]
  if leaked_names:
    attributes.clear()
    attributes.update(saved_attributes)
    name = f"{type(owner).__name__}.{fun.__name__}"
    raise TypeError(
      f"fun must return the arrays that it computes, got {name}, which writes"
      f" them to self.{leaked_names[0]}. Pass the function that it calls:"
      f" {caller}(train_step, params, opt_state, batch)."
    )


def _get_capture_fn(name: str) -> Callable[[Any], Any] | None:
  """Return how to capture a value with this tag; None if it is not needed."""
  tag = _tags.parse_tag(name)
  if tag is None or tag.kind.endswith("scale"):
    return None
  capture_fns = {
    "applied": lambda x: x.astype(jnp.int8),
    "unscaled": _nonfinite_indicator,
  }
  return capture_fns.get(tag.kind, lambda x: x)


def _is_unscaled_tag(name: str) -> bool:
  """Return whether a tag is on gradients that ``value_and_grad`` returned."""
  tag = _tags.parse_tag(name)
  return tag is not None and tag.kind == "unscaled"


def _nonfinite_indicator(x: jax.Array) -> jax.Array:
  """Return a scalar that is finite if and only if an array is.

  It is zero for a finite array, so it stays finite if many of them are added.
  """
  nonfinite_part = jnp.where(jnp.isfinite(x), 0, jnp.abs(x))
  return jnp.sum(nonfinite_part).astype(jnp.float32)


def _as_outputs(
  tagged_values: list[_harvest.TaggedValue],
) -> list[_scaling_mistakes.Output]:
  """Return outputs for tagged values, with the number of their ``update``.

  If there are several updates, names begin with this number: ``[0]/``.
  """
  current_groups: dict[str, int] = {}
  last_index: dict[str, int] = {}
  outputs = []
  for name, branches in tagged_values:
    tag = _tags.parse_tag(name)
    assert tag is not None  # Values with other tags are not captured.
    kind = tag.kind.removeprefix("scaled_")
    # The leaves of an update are in ascending order, so a lower index begins
    # another update.
    if tag.leaf_index <= last_index.get(kind, tag.leaf_index):
      current_groups[kind] = current_groups.get(kind, -1) + 1
    last_index[kind] = tag.leaf_index
    outputs.append(
      _scaling_mistakes.Output(kind, tag.path, current_groups[kind], branches)
    )
  return [
    out._replace(name=f"[{out.group}]/{out.name}")
    if current_groups[out.kind]
    else out
    for out in outputs
  ]


def _get_positional_names(fun: Callable[..., Any], num_args: int) -> list[str]:
  """Return a name for each positional argument."""
  names = _get_parameter_names(fun)[:num_args]
  return names + [f"args[{i}]" for i in range(len(names), num_args)]


def _collect_float_results(
  out: Any,
) -> list[tuple[_scaling_mistakes.Output, Any]]:
  """Return the float arrays in the result of a function, with their names.

  The items of a tuple are separate results, such as a loss and gradients.
  """
  # Only plain tuples are split: a named tuple, a dict or a list is one result.
  is_result = lambda x: type(x) is not tuple
  results = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_result)
  leaves = [
    (i, (*outer_path, *inner_path), leaf)
    for i, (outer_path, result) in enumerate(results)
    for inner_path, leaf in jax.tree_util.tree_leaves_with_path(result)
  ]
  names = _paths.leaf_names(path for _, path, _ in leaves)
  return [
    (_scaling_mistakes.Output("result", name, i), leaf)
    for name, (i, _, leaf) in zip(names, leaves, strict=True)
    if _is_float_array(leaf)
  ]


def _is_float_array(leaf: Any) -> bool:
  return _arrays.is_array_like(leaf) and _arrays.is_inexact(leaf)


def describe_unreached(locations: list[str]) -> list[str]:
  """Return sentences on gradients that could not become outputs."""
  return [
    f"gradients inside {location}: pass a single step instead"
    for location in dict.fromkeys(locations)
  ]


def _is_input(leaf: Any) -> bool:
  if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or _is_ref(leaf):
    return True
  # NumPy integers may be sizes and indices, which must stay concrete.
  is_numpy = isinstance(leaf, (np.ndarray, np.generic))
  return is_numpy and _arrays.is_inexact(leaf)


def _is_ref(x: Any) -> bool:
  return hasattr(x, "dtype") and _avals.is_ref(getattr(x, "aval", None))


def _as_input(leaf: Any) -> Any:
  """Return the array of an argument, or the current contents of a Ref."""
  return leaf[...] if _is_ref(leaf) else leaf


def _as_call_leaf(leaf: Any, array: Any) -> Any:
  """Return an argument for the call: a new Ref instead of a Ref.

  The function may write to the Ref, and must not change the caller's.
  """
  return jax.new_ref(array) if _is_ref(leaf) else array


def _check_no_ref_consts(closed_jaxpr: _eqns.ClosedJaxpr) -> None:
  if any(map(_is_ref, closed_jaxpr.consts)):
    raise TypeError(
      "fun closes over a jax.Ref, so running fun would change it. Pass the Ref"
      " as an argument, since arguments are copied."
    )


def _closed_over_message(caller: str, fun: Any) -> str:
  name = getattr(fun, "__name__", type(fun).__name__)
  return (
    f"{name} changes Flax NNX objects that are not arguments: {name} closes"
    " over them, or nnx.cached_partial binds them. Write"
    f" {caller}({name}, model, optimizer, batch), with the function before"
    " nnx.cached_partial."
  )


def _check_no_dropped_scans(
  caller: str, closed_jaxpr: _eqns.ClosedJaxpr
) -> None:
  has_hijax_scan = _higher_order.has_hijax_scan(closed_jaxpr)
  if has_hijax_scan and _higher_order.is_scan_dropped_by_jit():
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
  caller: str, input_names: list[str], inputs: list[Any], allow_abstract: bool
) -> None:
  requirement = (
    f"{caller} must be called outside jit, since it runs on the host"
  )
  for name, leaf in zip(input_names, inputs, strict=True):
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(f"{requirement}, got a tracer at {name}.")
    if isinstance(leaf, jax.ShapeDtypeStruct) and not allow_abstract:
      raise TypeError(
        f"{caller} needs concrete arrays, got {leaf} at {name}. Pass arrays."
        " Only precision_report accepts shapes."
      )
  if not allow_abstract and isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(f"{requirement}.")


def _get_parameter_names(fun: Callable[..., Any]) -> list[str]:
  """Return the names of the positional parameters; none if unknown."""
  try:
    parameters = inspect.signature(fun).parameters.values()
  except (TypeError, ValueError):
    return []
  # The enum lists POSITIONAL_ONLY and POSITIONAL_OR_KEYWORD before
  # VAR_POSITIONAL.
  return [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
