"""``compare_precision``: which layer loses the precision of the gradients.

1. Trace the function, and run it as trained.
2. Run it with float32 in place of all half precision (the reference), and with
   perturbed operands. An error that any rounding causes is expected
   (``_reference_runs``).
3. If an error is large, run the function as trained with other loss scales: an
   underflow ends with a higher one.
4. Run it with one layer in half precision, for each layer. One program serves
   all of these runs. ``check_step`` omits this if the error is small.
5. Report the error that each layer causes alone, and the outliers among them.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale._autocast import _matmuls
from optax_lossscale.diagnostics import (
  _instrumented_program,
  _progress,
  _reports,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _comparison,
  _errors,
  _layers,
  _limits,
  _reference_runs,
)


@_transfer_guard.allow_transfers
def compare_precision(
  fun: Callable[..., Any],
  *args: Any,
  progress: bool = True,
  **kwargs: Any,
) -> _comparison.PrecisionComparison:
  """Measures which layers of a function lose precision in half precision.

  The function computes in float16, bfloat16 or float8, whatever makes it do so:
  :func:`optax_lossscale.autocast`, the ``dtype=`` of a library, or casts by
  hand. It runs as trained, with float32 in place of all half precision, and
  once for each layer, with only the operations of this layer in half precision.
  The runs for the layers share one compiled program. A *layer* is what a
  program computes at one location: a matmul, a normalization, a sum.

  Each array is judged individually, since optimizers such as Adam scale each
  gradient relative to its size. Errors that any rounding would cause are left
  out. They are detected by one more run in float32, in which operands change by
  a relative 2**-20.

  For a training step, the gradients that the optimizer receives are compared,
  and results that don't depend on them, such as running averages. (Updated
  parameters are useless for this: with Adam they move by about the learning
  rate, whatever the gradients are.) They are the gradients that the ``update``
  of :func:`~optax_lossscale.with_loss_scaling` receives, or, in a step without
  it, those that leave the backward pass. For any other function, such as a
  gradient, its results are compared.

  Args:
    fun: a function that ``jax.jit`` could take, and that computes in half
      precision: a training step, whatever it returns, or gradients,
      ``ols.grad(loss_fn, opt_state)``. Callbacks that return nothing, such as
      ``jax.debug.print``, do not run; others are called by each run.
    *args: its arguments: anything that ``fun`` takes.
    progress: whether to show on the standard error stream how far it is, after
      a second. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`PrecisionComparison`, which prints as a table, the worst first.

  Raises:
    RuntimeError: if JAX compiles another program than it traces, as with a scan
      under the flag ``jax_scan3``.
    TypeError: if ``fun`` is not callable, or an argument is a shape or is
      traced.
    ValueError: if ``fun`` rounds nothing to half precision; or if it is no
      training step, and its results hold no floats.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(params, x):
    ...   hidden = x.astype(jnp.float16) @ params["first"].astype(jnp.float16)
    ...   scores = 1e4 * hidden @ params["second"].astype(jnp.float16)
    ...   return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32)) ** 2)
    >>> params = {"first": jnp.eye(8), "second": jnp.eye(8)}
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, params, jnp.full((4, 8), 9.0), progress=False)
    >>> report.error, len(report.overflowing)
    (inf, 1)

  .. seealso:: :func:`check_step` measures layers only if an error is large.
  """
  with _tracing.trace_on_host(
    "compare_precision",
    fun,
    args,
    kwargs,
    progress=progress,
  ) as (traced, progress_line):
    if not list_compared_outputs(traced):
      raise ValueError(_no_floats_message(fun))
    program = _instrumented_program.InstrumentedProgram(traced, checked=())
    run = lambda inputs, replaced: program.run(inputs, replaced=replaced).outs
    progress_line.set_description("running the function as trained")
    runs = _step_runs.StepRuns(traced, run, run(traced.inputs, {}))
    comparison = compare_runs(runs, progress_line, measures_all=True)
    if comparison is None or comparison.report is None:
      raise ValueError(_no_half_message(fun, traced))
    return comparison.report


class ComparisonResult(NamedTuple):
  """A comparison of a traced function in half precision with float32.

  Attributes:
    report: the report; None if no compared output depends on half precision.
    outs: the outputs in float32, by their indices.
    run: a function from the inputs to the outputs in float32.
    is_exact: whether all of the function runs in float32 then.
  """

  report: _comparison.PrecisionComparison | None
  outs: dict[int, Any]
  run: Callable[[list[Any]], dict[int, Any]]
  is_exact: bool


def compare_runs(
  step_runs: _step_runs.StepRuns,
  progress: _progress.ProgressLine,
  *,
  measures_all: bool,
  further_outputs: Sequence[int] = (),
) -> ComparisonResult | None:
  """Compare the runs of a function in half precision with float32.

  Args:
    step_runs: the runs of the function.
    progress: shows how far it is.
    measures_all: whether to measure the layers although all errors are small.
    further_outputs: the indices of outputs that run in float32, too, but are
      not compared.

  Returns:
    A :class:`ComparisonResult`; None if nothing that leads to one of these
    outputs is rounded to half precision.
  """
  indices = list_compared_outputs(step_runs.traced)
  traced = step_runs.traced.restrict_outputs(indices)
  dtypes = _layers.find_half_dtypes(traced.closed_jaxpr)
  if not indices or not (dtypes or further_outputs):
    return None
  # With two dtypes, thresholds are those of the one with fewer bits.
  eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes or {jnp.bfloat16})
  select = lambda outs: [outs[i] for i in indices]
  half_runs = _step_runs.StepRuns(
    traced,
    lambda inputs, replaced: select(step_runs.run(inputs, replaced).outs),
    select(step_runs.base.outs),
  )
  all_indices = [*indices, *further_outputs]
  closed_jaxpr = step_runs.traced.restrict_outputs(all_indices).closed_jaxpr
  reference = _reference_runs.run_reference(
    half_runs, closed_jaxpr, eps, progress
  )
  report = _report_errors(reference, dtypes, eps) if dtypes else None
  if report and report.reference_is_finite and not report.reference_is_zero:
    report = _explain_errors(
      report, step_runs, reference, eps, progress, measures_all=measures_all
    )
  index = lambda outs: dict(zip(all_indices, outs, strict=True))
  return ComparisonResult(
    report,
    index(reference.outs),
    lambda inputs: index(reference.program.run(inputs).outs),
    is_exact=not reference.program.limitations,
  )


def list_compared_outputs(traced: _tracing.TracedFunction) -> list[int]:
  """Return the indices of the outputs that a comparison needs."""
  compared = set(_errors.list_compared_indices(traced.outputs))
  # Other reports read whether an unscaled gradient is finite.
  step_kinds = {"unscaled"} if traced.grad_outputs else set()
  return [
    i
    for i, output in enumerate(traced.outputs)
    if i in compared or output.kind in step_kinds
  ]


def _report_errors(
  reference: _reference_runs.ReferenceRun, dtypes: set[Any], eps: float
) -> _comparison.PrecisionComparison:
  """Return a report of the errors, without layers."""
  traced, errors = reference.half_runs.traced, reference.errors
  names, effects = reference.comparison.names, reference.compute_effects()
  limitations = [
    f"Not analyzed: {x}."
    for x in _tracing.describe_unreached(traced.unreached_locations)
  ]
  is_large = _limits.find_large_errors(effects, eps)
  order = np.argsort(-errors.array_errors, kind="stable")
  return _comparison.PrecisionComparison(
    dtype=" and ".join(sorted(map(str, dtypes))),
    target="gradients" if traced.grad_outputs else "results",
    reference_is_zero=errors.is_zero,
    error=float(effects[0]),
    reference_is_finite=errors.is_finite,
    outliers=(),
    array_errors=dict(zip(names, errors.array_errors.tolist(), strict=True)),
    layers=(),
    limitations=tuple(
      dict.fromkeys([*limitations, *reference.program.limitations])
    ),
    ill_conditioned_arrays=tuple(
      itertools.compress(names, reference.noise_mask)
    ),
    inaccurate_arrays=tuple(names[i] for i in order if is_large[1 + i]),
    underflow_fraction=errors.underflow_fraction,
    is_accurate=not is_large.any(),
  )


def _explain_errors(
  report: _comparison.PrecisionComparison,
  step_runs: _step_runs.StepRuns,
  reference: _reference_runs.ReferenceRun,
  eps: float,
  progress: _progress.ProgressLine,
  *,
  measures_all: bool,
) -> _comparison.PrecisionComparison:
  """Add what causes the errors to a report: the loss scale, and layers."""
  if not report.is_accurate and reference.half_runs.traced.scale_indices:
    log2_change = _find_scale_change(step_runs, reference, eps)
    report = dataclasses.replace(
      report, suggested_log2_scale_change=log2_change
    )
  layers = None
  if reference.layers and not measures_all:  # The outputs are not finite.
    layers = _reference_runs.explain_overflow(reference)
  elif measures_all or (
    _limits.exceeds_limits(reference.compute_effects(), eps).any()
    and not report.suggested_log2_scale_change
  ):
    layers = _reference_runs.measure_all_layers(
      reference.half_runs.traced, reference.noise_mask, progress
    )
  if layers is not None:
    report = report_layers(report, layers.rows, layers.isolated_effects, eps)
    if not (
      report.is_accurate
      or report.suggested_log2_scale_change
      or step_runs.loss_scale_acts  # Others were tried.
    ):
      report = _suggest_scaling(report, eps)
  amplified_mask = reference.amplified_mask
  return excuse_errors(
    report,
    tuple(itertools.compress(reference.comparison.names, amplified_mask)),
    reference.compute_effects(amplified_mask),
    layers and layers.measure_without,
    eps,
  )


def _suggest_scaling(
  report: _comparison.PrecisionComparison, eps: float
) -> _comparison.PrecisionComparison:
  """Suggest a loss scale if the backward pass underflows without any."""
  log2_increase = _limits.compute_log2_shortfall(
    [
      (
        row.isolated_error or 0.0,
        (row.underflow_fraction or 0.0) + (row.subnormal_fraction or 0.0),
        row.log2_headroom or 0.0,
      )
      for row in report.layers
      if row.backward
    ],
    eps,
  )
  return dataclasses.replace(report, suggested_log2_scale_change=log2_increase)


def _find_scale_change(
  step_runs: _step_runs.StepRuns,
  reference: _reference_runs.ReferenceRun,
  eps: float,
) -> int:
  """Return log2 of a factor on the loss scale that helps; 0 if none does."""
  effects = reference.compute_effects()
  measure_at = reference.measure_effects_at
  if np.isfinite(effects).all():
    return _limits.find_log2_increase(effects, measure_at, eps)
  is_finite = lambda x: (
    step_runs.has_finite_grads_at(x) and bool(np.isfinite(measure_at(-x)).all())
  )
  return -(_step_runs.find_log2_decrease(is_finite) or 0)


def report_layers(
  report: _comparison.PrecisionComparison,
  rows: Sequence[_reports.LayerPrecision],
  effects: Sequence[np.ndarray],
  eps: float,
) -> _comparison.PrecisionComparison:
  """Add measured layers to a report, and which of them cause an error.

  Args:
    report: the report.
    rows: the rows of the layers.
    effects: the effect of each; float64[1 + arrays].
    eps: the spacing of numbers at 1 in half precision.
  """
  # If errors are equal, such as inf, the layer with the largest numbers is
  # first.
  pairs = sorted(
    zip(rows, effects, strict=True),
    key=lambda pair: (-pair[1][0], -(pair[0].amax or 0.0)),
  )
  overflowing = [
    row
    for row, effect in pairs
    if row.overflows
    and row.name
    and not row.backward
    and _limits.exceeds_limits(effect, eps).any()
  ]
  overflowing.sort(key=lambda row: row.log2_headroom or 0.0)
  log2_change = report.suggested_log2_scale_change
  if not log2_change and not overflowing and not math.isfinite(report.error):
    headrooms = [row.log2_headroom or 0.0 for row in rows if row.backward]
    log2_change = -_limits.compute_log2_excess(headrooms)
  outliers: tuple[str, ...] = ()
  # If the backward pass overflows, the errors of all layers are infinite.
  if pairs and log2_change >= 0:
    names, columns = zip(*((x.name, y) for x, y in pairs), strict=True)
    outliers = _limits.find_outliers(names, np.array(columns), eps)
  return dataclasses.replace(
    report,
    layers=tuple(row for row, _ in pairs),
    outliers=outliers,
    overflowing=tuple(dict.fromkeys(row.name for row in overflowing)),
    suggested_log2_scale_change=log2_change,
  )


def excuse_errors(
  report: _comparison.PrecisionComparison,
  names: Sequence[str],
  effects: np.ndarray,
  measure_without: Callable[[Sequence[str]], np.ndarray] | None,
  eps: float,
) -> _comparison.PrecisionComparison:
  """Leave out arrays whose large errors any rounding causes, but no layer.

  Args:
    report: the report.
    names: the names of the arrays.
    effects: the errors as trained without these arrays.
    measure_without: returns the errors without some layers; None if no layer
      was measured.
    eps: the spacing of numbers at 1 in half precision.
  """
  if not names or report.suggested_log2_scale_change or report.overflowing:
    return report
  is_accurate = not _limits.find_large_errors(effects, eps).any()
  if report.outliers and measure_without is not None:
    # Outliers are to blame if the errors are small without them.
    remaining = measure_without(report.outliers)
    is_fixed = not _limits.find_large_errors(remaining, eps).any()
    if is_fixed or not is_accurate:
      return report
  return dataclasses.replace(
    report,
    outliers=(),
    ill_conditioned_arrays=(*report.ill_conditioned_arrays, *names),
    error=float(effects[0]),
    inaccurate_arrays=tuple(
      x for x in report.inaccurate_arrays if x not in names
    ),
    is_accurate=is_accurate,
  )


def _no_floats_message(fun: Callable[..., Any]) -> str:
  name = getattr(fun, "__name__", fun)
  return (
    f"compare_precision has nothing to compare: {name} returns no floats and"
    " is no training step. Return the gradients, or the output of the last"
    " layer."
  )


def _no_half_message(
  fun: Callable[..., Any], traced: _tracing.TracedFunction
) -> str:
  name = getattr(fun, "__name__", fun)
  message = (
    f"compare_precision has nothing to compare: {name} rounds nothing to"
    " float16, bfloat16 or float8 that leads to a result."
  )
  if _matmuls.MatmulSearch(jnp.float32).any_in_jaxpr(traced.closed_jaxpr.jaxpr):
    message += (
      " Its matmuls run in float32: pass a function with an autocast inside,"
      " such as ols.grad(ols.autocast(loss_fn), opt_state)."
    )
  return message
