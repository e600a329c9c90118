"""``find_overflow``: which operation an inf or a NaN comes from.

1. Trace the function; tagged gradients become outputs of the jaxpr.
2. Run it as one compiled program, with flags for values inside of it
   (``_instrumented_program``). If all outputs are finite, there is no overflow.
3. Otherwise, find the origins of the nonfinite outputs (``_origins``), and
   describe them (``_description``).
4. Report origins that reach an ``update`` first.
"""

from collections.abc import Callable
import dataclasses
import re
from typing import Any, NamedTuple

from optax_lossscale import _arrays
from optax_lossscale._jaxprs import _regions, _source_info
from optax_lossscale.diagnostics import (
  _host_values,
  _instrumented_program,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._overflow import (
  _description,
  _origins,
  _report,
)

# The outputs that show what an ``update`` receives and computes.
_UPDATE_KINDS = {"grads", "unscaled", "updates"}
# These may be infinite in a sound step. If `update` skips the step, it discards
# the updates of the inner optimizer.
_IGNORED_KINDS = {"logged", "new_updates"}
# Matches the name of an argument in the state of a wrapped optimizer.
# ``update`` receives this state, too.
_INNER_STATE_RE = re.compile(r"\.inner_state\b")
_REPEATED_CALLBACK = (
  "find_overflow called the io_callback of this function in each of its runs,"
  " since the function uses the result."
)


@_arrays.allow_transfers
def find_overflow(
  fun: Callable[..., Any],
  *args: Any,
  progress: bool = True,
  **kwargs: Any,
) -> _report.Overflow | None:
  """Finds the operation that first produced an inf or a NaN.

  The checked values are the outputs of ``fun``; the gradients of a training
  step, even if it does not return them: those that its optimizer receives, and
  those that :func:`~optax_lossscale.value_and_grad` returns, since the step may
  hide an overflow from ``update``; and the arrays that ``fun`` changes in its
  arguments, as Flax NNX does. Origins that reach an ``update`` come first. An
  argument of a training step that is not finite is reported only if it reaches
  an ``update``; the mean of a metric that an earlier step made NaN is not. The
  arguments are not modified: a ``Ref`` of JAX is copied.

  The function runs as one compiled program, as in training, except that XLA
  optimizes it less, and may not keep numbers in more bits than their dtype has.
  The program also returns flags for values inside of it. If all checked values
  are finite, the search ends. Otherwise a second program measures the
  operations where an inf or a NaN originated, and runs with their infs and NaNs
  replaced, all but those of one operation at a time, to see which of them reach
  the result. An inf that reaches no result is not reported, such as a masked
  logit of -inf, or the branch of a ``where`` that is not taken.

  What the function prints or logs appears once. A callback that returns
  something, such as an ``io_callback`` with a result, is called by each run,
  and ``find_overflow`` warns of it. Writes into a ``Ref`` of JAX are not
  followed: the operation that reads the ``Ref`` is reported. A primitive that
  is unknown to this package is reported as a whole.

  Args:
    fun: any function that ``jax.jit`` could take, also one that is jitted or
      differentiated: a training step, or ``ols.grad(loss_fn, opt_state)``.
    *args: its arguments: anything that ``fun`` takes, such as models of Flax
      NNX or Equinox, functions, strings.
    progress: whether to show on the standard error stream which operation is
      run, after a second. The line is erased at the end. (If ``fun`` has an
      argument of this name, bind it with ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    None if all checked values are finite. ``find_overflow`` then warns if some
    gradients were not analyzed. Otherwise an :class:`Overflow`: the first
    operation, in the order of the program, that returned an inf or a NaN from
    finite inputs, and whose
    inf or NaN reached a checked value. Further origins are in its field
    ``other_origins``. If there is no origin, an inf is written in the program:
    the first operation that reads it is reported.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(w, x):
    ...   hidden = jnp.exp(x @ w)
    ...   return jnp.mean(jnp.where(x > 0, hidden, 0).astype(jnp.float32))
    >>> w = jnp.full((2, 2), 4, jnp.float16)
    >>> x = jnp.array([[1, 1], [1, 2]], jnp.float16)
    >>> hit = diagnostics.find_overflow(jax.value_and_grad(loss_fn), w, x)
    >>> print(hit.kind, hit.primitive, hit.inputs[0])
    inf exp float16[2,2] (max abs 12)
    >>> diagnostics.find_overflow(loss_fn, w, x / 2) is None
    True
  """
  with _tracing.trace_on_host(
    "find_overflow", fun, args, kwargs, progress=progress
  ) as (traced, progress_line):
    result = search_traced(traced, progress_line)
  if result.origin is None:
    for limitation in result.limitations:
      _source_info.warn_user(f"find_overflow found no inf or NaN. {limitation}")
  elif _instrumented_program.has_callback(traced.closed_jaxpr.jaxpr):
    _source_info.warn_user(_REPEATED_CALLBACK)
  return result.origin


class SearchResult(NamedTuple):
  """Result of the search in a traced program.

  Attributes:
    origin: the first origin; None if all results are finite.
    limitations: why a program without an origin may still be wrong, in
      sentences.
    runs: the runs of the program.
    finite_runs: the same; if its outputs are not finite, with a loss scale with
      which they are, if there is any.
  """

  origin: _report.Overflow | None
  limitations: list[str]
  runs: _step_runs.StepRuns
  finite_runs: _step_runs.StepRuns


def search_traced(
  traced: _tracing.TracedFunction,
  progress: _tracing.ProgressLine,
  *,
  ignores_metrics: bool = False,
) -> SearchResult:
  """Find the origin of an inf or a NaN in a traced program."""
  program = _instrumented_program.InstrumentedProgram(traced)
  progress.set_description("compiling and running the function")
  record = program.run(traced.inputs, has_prints=True)
  run = lambda inputs, replaced: program.run(inputs, replaced=replaced).outs
  runs = _step_runs.StepRuns(traced, run, record.outs)
  bad_outputs = [
    i
    for i in _host_values.list_nonfinite(record.outs)
    if traced.outputs[i].kind not in _IGNORED_KINDS
    and not (ignores_metrics and traced.outputs[i].is_metric)
    # A constant of the program that it returns is intended.
    and traced.regions.reads[_regions.get_output_key(i)]
  ]
  relevant = _find_relevant_origins(program, record, bad_outputs, progress)
  if not relevant:
    unreached = _tracing.describe_unreached(traced.unreached_locations)
    limitations = [f"Not analyzed: {x}." for x in unreached]
    return SearchResult(None, limitations, runs, runs)
  origins = _description.describe_origins(traced, relevant)
  (first, *others), finite_runs = _assess_loss_scale(runs, origins)
  origin = dataclasses.replace(first, other_origins=tuple(others))
  return SearchResult(origin, [], runs, finite_runs)


def _assess_loss_scale(
  runs: _step_runs.StepRuns, origins: list[_report.Overflow]
) -> tuple[list[_report.Overflow], _step_runs.StepRuns]:
  """Find out whether a lower loss scale keeps the gradients of a step finite.

  An inf in the backward pass is usually the fault of the loss scale, but a
  division by zero is not. If no loss scale helps, or the loss itself is not
  finite, the origins in the forward pass are first.

  Args:
    runs: the runs of the step.
    origins: the origins of their infs and NaNs.

  Returns:
    The origins, of which those in the backward pass have a ``scale_factor`` if
    it can be measured; and the runs with this factor, if there are any.
  """
  traced, factor, finite_runs = runs.traced, None, runs
  if (
    any(origin.backward for origin in origins)
    and traced.scale_indices
    and not runs.base.has_finite_grads
  ):
    log2_decrease = _step_runs.find_log2_decrease(runs.has_finite_grads_at)
    factor = 0.0 if log2_decrease is None else 2.0**-log2_decrease
  if factor:
    finite_runs = runs.with_lower_scale(factor)
  # Without an `update`, the gradients themselves are no outputs.
  grads = finite_runs.base.select("grads")
  has_loss_scale = bool(traced.scale_indices) or any(
    output.kind in ("grads", "unscaled") for output in traced.outputs
  )
  has_zero_grads = bool(factor and grads) and not _host_values.is_any_nonzero(
    grads
  )
  origins = [
    dataclasses.replace(
      _report.add_context(
        origin,
        has_loss_scale=has_loss_scale,
        has_zero_grads=has_zero_grads and origin.backward,
      ),
      scale_factor=factor if origin.backward else None,
    )
    for origin in origins
  ]
  has_finite_loss = _host_values.all_finite(runs.base.select("loss"))
  if factor == 0 or not has_finite_loss:
    # An argument is the origin of what it reaches, whatever the direction is.
    origins.sort(key=lambda origin: origin.backward)
  return origins, finite_runs


def _find_relevant_origins(
  program: _instrumented_program.InstrumentedProgram,
  record: _instrumented_program.RunRecord,
  bad_outputs: list[int],
  progress: _tracing.ProgressLine,
) -> list[_origins.Origin]:
  """Return the origins to report; those that reach an ``update`` come first.

  A nonfinite argument of a training step that reaches no ``update``, such as
  the mean of a metric that an earlier step made NaN, is not a fault of this
  step.
  """
  if not bad_outputs:
    return []
  traced = program.traced
  origins = _origins.find_origins(program, record, bad_outputs, progress)
  if not traced.grad_outputs or traced.unreached_locations:
    return origins

  def reaches_update(origin: _origins.Origin) -> bool:
    kinds = {traced.outputs[i].kind for i in origin.outputs}
    return not kinds.isdisjoint(_UPDATE_KINDS)

  def is_relevant(origin: _origins.Origin) -> bool:
    return (
      not _regions.is_argument(origin.key)
      or _is_faulty_state(traced, origin.key[1])
      or reaches_update(origin)
    )

  return sorted(
    filter(is_relevant, origins), key=lambda origin: not reaches_update(origin)
  )


def _is_faulty_state(traced: _tracing.TracedFunction, index: int) -> bool:
  """Return whether an argument is an array of the inner optimizer's state.

  A scalar of it may be infinite, such as the best loss so far.
  """
  array, name = traced.inputs[index], traced.input_names[index]
  is_state = _INNER_STATE_RE.search(name) is not None
  return is_state and (array.shape != () or _host_values.has_nan(array))
