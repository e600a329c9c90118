"""Compare the runs of a traced function in half precision with float32.

1. Run the function with float32 in place of all half precision, the reference,
   and, if an error is large, with perturbed operands. An error that any
   rounding causes is expected.
2. If an error is large, run the function as trained with other loss scales: an
   overflow of the backward pass ends with a lower one, an underflow with a
   higher one.
3. Run it with one layer in half precision, for each layer. The *effect* of a
   layer is the error of each array then. ``check_step`` omits this if the error
   is small, or another loss scale helps. After an overflow, the magnitudes of
   the layers explain it.
4. Report the errors, and the layers or the loss scale that cause them.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _reports,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _comparison,
  _errors,
  _layers,
  _limits,
  _reference_program,
)


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
  progress: _tracing.ProgressLine,
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
  traced = step_runs.traced
  indices = _errors.list_compared_indices(traced.outputs)
  layers = _layers.list_rounding_layers(
    traced.restrict_outputs(indices).closed_jaxpr
  )
  if not indices or not (layers or further_outputs):
    return None
  has_overflow = not _host_values.all_finite(
    step_runs.base.outs[i] for i in indices
  )
  log2_decrease = 0
  if has_overflow and traced.scale_indices:
    log2_decrease = _find_log2_decrease(step_runs, indices)
  matmul_layers: list[_layers.Layer] = []
  # If no loss scale helps, the magnitudes of the matmuls explain an overflow.
  if has_overflow and not (measures_all or log2_decrease):
    matmul_layers = [x for x in layers if x.has_matmul]
  program = _reference_program.ReferenceProgram(
    traced, [*indices, *further_outputs], matmul_layers
  )
  progress.set_description("running the function in float32")
  # Wait, so that the progress line shows what is being executed.
  reference = jax.block_until_ready(program.run(traced.inputs))
  report = None
  if layers:
    errors = _measure_errors(step_runs, program, reference.outs, layers)
    causes = _limits.Causes()
    if errors.as_trained.is_finite and not errors.as_trained.is_zero:
      rows = _layers.make_rows(matmul_layers, reference.stats)
      causes = _find_causes(
        step_runs,
        errors,
        layers,
        rows,
        progress,
        log2_decrease=log2_decrease,
        measures_all=measures_all,
      )
    report = _make_report(traced, errors, causes, layers, program.limitations)
  return ComparisonResult(
    report,
    reference.outs,
    lambda inputs: program.run(inputs).outs,
    is_exact=not program.limitations,
  )


class _MeasuredErrors(NamedTuple):
  """The errors of a function as trained.

  Attributes:
    comparison: compares outputs with those in float32.
    as_trained: the errors as trained.
    noise_mask: whether each array is only rounding noise in float32, too;
      bool[arrays].
    amplified_mask: whether each array has a large error that any rounding may
      cause, since the function amplifies roundings; bool[arrays].
    eps: the spacing of numbers at 1 in half precision.
  """

  comparison: _errors.OutputComparison
  as_trained: _errors.RunErrors
  noise_mask: np.ndarray
  amplified_mask: np.ndarray
  eps: float

  def compute_effects(self, excluded_mask: Any = False) -> np.ndarray:
    """Return the errors as trained without noise, and without other arrays."""
    return self.comparison.compute_effects(
      self.as_trained, self.noise_mask | excluded_mask
    )


def _measure_errors(
  step_runs: _step_runs.StepRuns,
  program: _reference_program.ReferenceProgram,
  reference_outs: dict[int, Any],
  layers: Sequence[_layers.Layer],
) -> _MeasuredErrors:
  """Return the errors as trained, and which of them are expected."""
  traced = step_runs.traced
  # With two dtypes, thresholds are those of the one with fewer bits.
  eps = max(float(jnp.finfo(x.dtype).eps) for x in layers)
  comparison = _errors.OutputComparison(traced.outputs, reference_outs)
  errors = comparison.compute_errors(step_runs.base.outs)
  masks = (np.zeros(len(comparison.names), bool),) * 2
  if _limits.may_be_expected(errors.array_errors):
    perturbed_outs = program.run(traced.inputs, is_perturbed=True).outs
    perturbed_errors = comparison.compute_errors(perturbed_outs).array_errors
    masks = _limits.find_expected_errors(
      errors.array_errors,
      perturbed_errors,
      perturbed_errors / _reference_program.PERTURBATION,
      eps,
    )
  return _MeasuredErrors(comparison, errors, *masks, eps)


def _find_causes(
  step_runs: _step_runs.StepRuns,
  errors: _MeasuredErrors,
  layers: Sequence[_layers.Layer],
  matmul_rows: Sequence[_reports.LayerPrecision],
  progress: _tracing.ProgressLine,
  *,
  log2_decrease: int,
  measures_all: bool,
) -> _limits.Causes:
  """Return what causes large errors: the loss scale, or layers.

  Args:
    step_runs: the runs of the function as trained.
    errors: its errors.
    layers: all layers that round.
    matmul_rows: the magnitudes of those with matmuls, if these were measured
      because of an overflow.
    progress: shows how far it is.
    log2_decrease: log2 of the decrease of the loss scale that ends an overflow;
      0 if none does.
    measures_all: whether to measure the layers although all errors are small.
  """
  effects, eps = errors.compute_effects(), errors.eps
  is_inaccurate = bool(_limits.find_large_errors(effects, eps).any())
  log2_change = -log2_decrease
  can_underflow = is_inaccurate and np.isfinite(effects).all()
  if can_underflow and not log2_decrease and step_runs.traced.scale_indices:
    log2_change = _find_log2_increase(step_runs, errors)
  measured = _MeasuredLayers()
  if matmul_rows:
    overflowing = [row for row in matmul_rows if row.overflows]
    effect = np.where(np.isinf(effects), math.inf, 0.0)
    measured = _MeasuredLayers(overflowing, [effect] * len(overflowing))
  elif measures_all or (
    _limits.find_large_errors(effects, eps, _limits.OUTLIER_EPS).any()
    and not log2_change
  ):
    measured = _measure_layers(
      step_runs.traced, layers, errors.noise_mask, progress
    )
  causes = _limits.find_causes(
    measured.rows,
    measured.row_effects,
    effects,
    eps,
    log2_scale_change=log2_change,
    tried_scales=is_inaccurate and step_runs.loss_scale_acts,
  )
  if errors.amplified_mask.any() and _limits.is_amplified(
    causes,
    errors.compute_effects(errors.amplified_mask),
    measured.measure_without,
    eps,
  ):
    causes = causes._replace(outliers=(), is_amplified=True)
  return causes


def _find_log2_decrease(
  step_runs: _step_runs.StepRuns, indices: Sequence[int]
) -> int:
  """Return log2 of a decrease of the loss scale that ends an overflow, or 0.

  Args:
    step_runs: the runs of the function as trained.
    indices: the indices of the outputs that must be finite.
  """

  def is_finite(log2_decrease: int) -> bool:
    if not step_runs.has_finite_grads_at(log2_decrease):
      return False
    run = step_runs.run_with_factor(2.0**-log2_decrease)
    return _host_values.all_finite(run.outs[i] for i in indices)

  return _step_runs.find_log2_decrease(is_finite) or 0


def _find_log2_increase(
  step_runs: _step_runs.StepRuns, errors: _MeasuredErrors
) -> int:
  """Return log2 of an increase of the loss scale that reduces errors, or 0."""

  def measure_at(log2_increase: int) -> np.ndarray:
    run = step_runs.run_with_factor(2.0**log2_increase)
    unscaled_outs = [
      # With `grads_are_scaled`, an `update` receives gradients times the scale.
      x * np.asarray(2.0**-log2_increase, x.dtype)
      if output.tag_kind == "scaled_grads"
      else x
      for output, x in zip(run.traced.outputs, run.outs, strict=True)
    ]
    return errors.comparison.measure_effects(unscaled_outs, errors.noise_mask)

  return _limits.find_log2_increase(
    errors.compute_effects(), measure_at, errors.eps
  )


class _MeasuredLayers(NamedTuple):
  """The layers of a program that were measured.

  Attributes:
    rows: a row for each measured layer.
    row_effects: the effect of each: the error of all arrays together, followed
      by that of each array; float64[1 + arrays].
    measure_without: takes names of layers, runs all other layers in half
      precision, and returns their effect; None if only the magnitudes of layers
      were measured.
  """

  rows: Sequence[_reports.LayerPrecision] = ()
  row_effects: Sequence[np.ndarray] = ()
  measure_without: Callable[[Sequence[str]], np.ndarray] | None = None


def _measure_layers(
  traced: _tracing.TracedFunction,
  layers: Sequence[_layers.Layer],
  noise_mask: np.ndarray,
  progress: _tracing.ProgressLine,
) -> _MeasuredLayers:
  """Run a function once for each layer, with this layer in half precision."""
  program = _reference_program.ReferenceProgram(
    traced,
    _errors.list_compared_indices(traced.outputs),
    layers,
    has_flags=True,
  )
  run_numbers = itertools.count(1)

  def run(half_layers: Sequence[int]) -> _reference_program.RunResult:
    progress.set_description(f"measuring layers, run {next(run_numbers)}")
    return jax.block_until_ready(program.run(traced.inputs, half_layers))

  reference = run(())
  comparison = _errors.OutputComparison(traced.outputs, reference.outs)
  measure = lambda half_layers: comparison.measure_effects(
    run(half_layers).outs, noise_mask
  )
  effects = [measure([i]) for i, _ in enumerate(layers)]
  return _MeasuredLayers(
    _layers.make_rows(layers, reference.stats),
    effects,
    lambda names: measure(
      [i for i, x in enumerate(layers) if x.name not in names]
    ),
  )


def _make_report(
  traced: _tracing.TracedFunction,
  errors: _MeasuredErrors,
  causes: _limits.Causes,
  layers: Sequence[_layers.Layer],
  limitations: Iterable[str],
) -> _comparison.PrecisionComparison:
  """Return the report of errors and their causes."""
  names, as_trained = errors.comparison.names, errors.as_trained
  amplified_mask = errors.amplified_mask & causes.is_amplified
  effects = errors.compute_effects(amplified_mask)
  is_large = _limits.find_large_errors(effects, errors.eps)
  worst_first = np.argsort(-as_trained.array_errors, kind="stable")
  unreached = [
    f"Not analyzed: {x}."
    for x in _tracing.describe_unreached(traced.unreached_locations)
  ]
  return _comparison.PrecisionComparison(
    dtype=" and ".join(sorted({str(x.dtype) for x in layers})),
    target="gradients" if traced.grad_outputs else "results",
    reference_is_zero=as_trained.is_zero,
    error=float(effects[0]),
    reference_is_finite=as_trained.is_finite,
    outliers=causes.outliers,
    array_errors=dict(
      zip(names, as_trained.array_errors.tolist(), strict=True)
    ),
    layers=causes.layers,
    limitations=tuple(dict.fromkeys([*unreached, *limitations])),
    ill_conditioned_arrays=tuple(
      itertools.compress(names, errors.noise_mask | amplified_mask)
    ),
    inaccurate_arrays=tuple(names[i] for i in worst_first if is_large[1 + i]),
    underflow_fraction=as_trained.underflow_fraction,
    is_accurate=not is_large.any(),
    overflowing=causes.overflowing,
    suggested_log2_scale_change=causes.log2_scale_change,
  )
