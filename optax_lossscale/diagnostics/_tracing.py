"""Trace a function with any arguments to a jaxpr with all outputs to check.

Arrays in the arguments become inputs of the jaxpr, and the float results become
its outputs. Values that a training step need not return become outputs, too
(see ``_outputs``), so that every report sees them: the gradients that
``update`` receives and those that ``value_and_grad`` returns, and arrays that
the function changes in its arguments, such as a model of Flax NNX.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks
from optax_lossscale._jaxprs import (
  _entry_flow,
  _eqns,
  _regions,
)
from optax_lossscale.diagnostics import (
  _flat_call,
  _outputs,
  _step_tags,
)

# A function that is faster shows no progress.
_DELAY_SECONDS = 1.0


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
    scale_indices: the indices of the inputs that are loss scales, in the order
      of the inputs.
    lowest_scale: the lowest loss scale that all policies allow; None if it is
      unknown.
    regions: what its outputs depend on.
    tags: the tags of the program by position.
    flow: the sources of its results.
    has_update: whether it calls the `update` of `with_loss_scaling`.
  """

  closed_jaxpr: _eqns.ClosedJaxpr
  inputs: list[Any]
  input_names: list[str]
  outputs: list[_outputs.Output]
  unreached_locations: list[str]
  cond_branch_locations: list[str]
  scale_indices: tuple[int, ...]
  lowest_scale: float | None
  regions: _regions.Regions
  tags: Mapping[_regions.Key, _outputs.TagGroup]
  flow: _entry_flow.EntryFlow
  has_update: bool

  @property
  def grad_outputs(self) -> list[_outputs.Output]:
    """The gradients that an optimizer receives."""
    return self.list_outputs("grads")

  def list_outputs(self, kind: str) -> list[_outputs.Output]:
    """Return the outputs of one kind."""
    return [output for output in self.outputs if output.kind == kind]

  def scale_inputs(
    self, factor: Any, indices: Collection[int] | None = None
  ) -> list[Any]:
    """Return the inputs with all loss scales, or some, times a factor."""
    indices = self.scale_indices if indices is None else indices
    return [
      # A NumPy factor keeps the array on its devices.
      x * np.asarray(factor, x.dtype) if i in indices else x
      for i, x in enumerate(self.inputs)
    ]

  def restrict_outputs(self, indices: Sequence[int]) -> "TracedFunction":
    """Return the function with only these outputs."""
    outvars = self.closed_jaxpr.jaxpr.outvars
    closed_jaxpr: Any = _eqns.replace_jaxpr_fields(
      self.closed_jaxpr, outvars=[outvars[i] for i in indices]
    )
    outputs = [self.outputs[i] for i in indices]
    return self._replace(closed_jaxpr=closed_jaxpr, outputs=outputs)


class ProgressLine:
  """Shows which program a slow function compiles or runs, after a second.

  On a terminal, each line replaces the line before, and :meth:`close` erases
  the last one. Elsewhere, such as in a log file, all lines remain.

  Args:
    caller: the name of the public function, with which each line begins.
    is_enabled: whether to write anything.
  """

  def __init__(self, caller: str, is_enabled: bool) -> None:
    self._caller = caller
    self._is_enabled = is_enabled
    self._start_time = time.monotonic()
    self._line_width = 0

  def set_description(self, description: str) -> None:
    """Write what begins now, and the time since the start."""
    elapsed = time.monotonic() - self._start_time
    if self._is_enabled and elapsed >= _DELAY_SECONDS:
      self._write_line(f"{self._caller}: {description}, {elapsed:.0f} s")

  def close(self) -> None:
    """Erase the line on a terminal."""
    if self._line_width:
      self._write_line("")

  def _write_line(self, line: str) -> None:
    if sys.stderr.isatty():
      # The spaces cover the rest of a longer line.
      padded_line = line.ljust(self._line_width)
      print(padded_line, end="\r", file=sys.stderr, flush=True)
      self._line_width = len(line)
    else:
      print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def trace_on_host(
  caller: str,
  fun: Callable[..., Any],
  args: Any,
  kwargs: Any,
  *,
  progress: bool,
) -> Iterator[tuple[TracedFunction, ProgressLine]]:
  """Trace a function, and set the context in which to run its jaxpr.

  In the context, JAX raises neither on NaN or inf nor if a random key is used
  twice, and ``jit`` is enabled.

  Args:
    caller: the name of the public function, for messages.
    fun: the function.
    args: its arguments.
    kwargs: its keyword arguments.
    progress: whether to write a progress line.

  Yields:
    The :class:`TracedFunction`, and the progress line.

  Raises:
    TypeError: see :func:`trace`.
  """
  with (
    contextlib.closing(ProgressLine(caller, progress)) as progress_line,
    jax.debug_nans(False),
    jax.debug_infs(False),
    jax.debug_key_reuse(False),
    jax.disable_jit(False),
  ):
    traced = trace(caller, fun, args, kwargs, allow_abstract=False)
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
    if jax.sharding.AxisType.Explicit in getattr(mesh, "axis_types", ()):
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
    TypeError: if ``fun`` is not callable, or closes over a Ref; if an argument
      is traced; or, unless ``allow_abstract``, if an argument is a shape, or
      under ``jit``.
  """
  hint = f" Write {caller}(fun, *args), not {caller}(fun(*args))."
  _checks.check_callable("fun", fun, hint=hint)
  # Trainers bind their model with a partial, and Flax NNX changes the model in
  # place, so bound arguments are checked like other arguments.
  while isinstance(fun, functools.partial):
    args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
    fun = fun.func
  call = _flat_call.FlatCall(fun, args, kwargs)
  inputs, input_names = call.inputs, call.input_names
  _check_inputs(caller, input_names, inputs, allow_abstract)
  trace_fun = lambda fun: jax.make_jaxpr(functools.partial(call, fun))(*inputs)
  step = _step_tags.tag_gradients(
    _step_tags.number_calls(_trace_or_unwrap(caller, fun, trace_fun)),
    input_names,
  )
  harvest, tagged_outputs = _step_tags.harvest_outputs(step.closed_jaxpr)
  closed_jaxpr = harvest.closed_jaxpr
  if any(map(_eqns.is_ref_object, closed_jaxpr.consts)):
    raise TypeError(
      "fun closes over a jax.Ref, so running fun would change it. Pass the Ref"
      " as an argument, since arguments are copied."
    )
  regions = _regions.Regions(closed_jaxpr)
  tags = _step_tags.list_tags(regions)
  outputs = _outputs.describe_outputs(
    closed_jaxpr,
    [*call.outputs, *tagged_outputs],
    input_names,
    regions,
    tags,
    step.flow,
  )
  return TracedFunction(
    closed_jaxpr,
    inputs,
    input_names,
    outputs,
    harvest.unreached_labels,
    harvest.cond_labels,
    call.scale_indices,
    step.lowest_scale,
    regions,
    tags,
    step.flow,
    step.has_update,
  )


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
    unwrapped_fun = getattr(fun, "__wrapped__", None)
    if unwrapped_fun is None or "compiler_options" not in str(error):
      raise
    return trace_fun(unwrapped_fun)


@contextlib.contextmanager
def _restore_attributes(caller: str, fun: Any) -> Iterator[None]:
  """Raise if a method writes tracers to its object, and restore the object.

  Otherwise the report would find no problem, and the object would lose its
  parameters: JAX raises only when they are used again.
  """
  owner = fun.__self__ if inspect.ismethod(fun) else None
  attributes = getattr(owner, "__dict__", {})
  saved_attributes = dict(attributes)
  yield
  leaked_names = [
    name
    for name, value in attributes.items()
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value))
  ]
  if leaked_names:
    attributes.clear()
    attributes.update(saved_attributes)
    raise TypeError(
      "fun must return the arrays that it computes, got"
      f" {type(owner).__name__}.{fun.__name__}, which writes them to"
      f" self.{leaked_names[0]}. Pass the function that it calls:"
      f" {caller}(train_step, params, opt_state, batch)."
    )


def describe_unreached(locations: list[str]) -> list[str]:
  """Return sentences on gradients that could not become outputs."""
  return [
    f"gradients inside {location}: pass a single step instead"
    for location in dict.fromkeys(locations)
  ]


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
        " Only count_flops accepts shapes."
      )
  if not allow_abstract and isinstance(jnp.zeros(()), jax.core.Tracer):
    raise TypeError(f"{requirement}.")
