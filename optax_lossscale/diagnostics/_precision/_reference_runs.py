"""Runs of a function in float32, and with single layers in half precision.

The run in float32 is what half precision is compared with. The effect of a
layer is the error of each array if this layer alone runs in half precision.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _host_values,
  _progress,
  _reports,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _errors,
  _layers,
  _limits,
  _reference_program,
)


@dataclasses.dataclass(frozen=True)
class ReferenceRun:
  """The run of a function in float32, and the errors as trained.

  Attributes:
    half_runs: runs of the function as trained.
    program: the function in float32.
    outs: the outputs in float32, and the further ones.
    comparison: compares outputs with those in float32.
    errors: the errors as trained.
    noise_mask: whether each array is only rounding noise in float32, too;
      bool[arrays].
    amplified_mask: whether each array has a large error that any rounding may
      cause, since the function amplifies roundings; bool[arrays].
    layers: the layers with matmuls if an output is not finite as trained, or
      else none.
    stats: their statistics in float32, by index of the layer.
  """

  half_runs: _step_runs.StepRuns
  program: _reference_program.ReferenceProgram
  outs: Sequence[Any]
  comparison: _errors.OutputComparison
  errors: _errors.RunErrors
  noise_mask: np.ndarray
  amplified_mask: np.ndarray
  layers: list[_layers.Layer]
  stats: dict[int, _layers.LayerStats]

  def compute_effects(self, excluded_mask: Any = False) -> np.ndarray:
    """Return the errors as trained that layers are to blame for.

    Args:
      excluded_mask: further arrays to leave out; bool[arrays].

    Returns:
      See :meth:`_errors.OutputComparison.compute_effects`.
    """
    return self._compute_effects(
      self.errors, self.half_runs.base, self.noise_mask | excluded_mask
    )

  def measure_effects_at(self, log2_factor: int) -> np.ndarray:
    """Run the function as trained with another loss scale.

    Args:
      log2_factor: log2 of the factor on the loss scale.

    Returns:
      See :meth:`compute_effects`.
    """
    run = self.half_runs.run_with_factor(2.0**log2_factor)
    unscaled_outs = [
      # With `grads_are_scaled`, an `update` receives gradients times the scale.
      x * np.asarray(2.0**-log2_factor, x.dtype)
      if output.tag_kind == "scaled_grads"
      else x
      for output, x in zip(run.traced.outputs, run.outs, strict=True)
    ]
    errors = self.comparison.compute_errors(unscaled_outs)
    return self._compute_effects(errors, run, self.noise_mask)

  def _compute_effects(
    self, errors: _errors.RunErrors, run: _step_runs.Run, mask: np.ndarray
  ) -> np.ndarray:
    effects = self.comparison.compute_effects(errors, mask)
    # A step may hide a gradient that is not finite, or not call `update`.
    has_overflow = not _host_values.all_finite(run.select("unscaled"))
    return np.maximum(effects, math.inf) if has_overflow else effects


def run_reference(
  half_runs: _step_runs.StepRuns,
  closed_jaxpr: _eqns.ClosedJaxpr,
  eps: float,
  progress: _progress.ProgressLine,
) -> ReferenceRun:
  """Run a function in float32; if an error is large, with perturbed operands.

  Args:
    half_runs: runs of the function as trained.
    closed_jaxpr: the function; further outputs may follow.
    eps: the spacing of numbers at 1 in half precision.
    progress: shows how far it is.
  """
  traced = half_runs.traced
  layers: list[_layers.Layer] = []
  # The magnitudes of the matmuls explain an overflow.
  if not _host_values.all_finite(half_runs.base.outs):
    layers = _layers.list_rounding_layers(traced.closed_jaxpr)
    layers = [x for x in layers if x.has_matmul]
  program = _reference_program.ReferenceProgram(
    closed_jaxpr, traced.inputs, layers
  )
  progress.set_description("running the function in float32")
  # Wait, so that the progress line shows what is being executed.
  reference = jax.block_until_ready(program.run(traced.inputs))
  comparison = _errors.OutputComparison(traced.outputs, reference.outs)
  errors = comparison.compute_errors(half_runs.base.outs)
  noise_mask = amplified_mask = np.zeros(len(comparison.names), bool)
  if _limits.may_be_expected(errors.error, errors.array_errors, eps):
    perturbed = program.run(traced.inputs, is_perturbed=True)
    perturbed_errors = comparison.compute_errors(perturbed.outs).array_errors
    noise_mask, amplified_mask = _limits.find_expected_errors(
      errors.array_errors,
      perturbed_errors,
      perturbed_errors / _reference_program.PERTURBATION,
      eps,
    )
  return ReferenceRun(
    half_runs=half_runs,
    program=program,
    outs=reference.outs,
    comparison=comparison,
    errors=errors,
    noise_mask=noise_mask,
    amplified_mask=amplified_mask,
    layers=layers,
    stats=_host_values.to_host(reference.stats),
  )


class LayerEffects(NamedTuple):
  """The layers of a program that were measured.

  Attributes:
    rows: a row for each measured layer.
    isolated_effects: the effect of each: the error of all arrays together,
      followed by that of each array; float64[1 + arrays].
    measure_without: runs all layers except those with some names in half
      precision, and returns their effect; None if only the magnitudes of layers
      were measured.
  """

  rows: list[_reports.LayerPrecision]
  isolated_effects: list[np.ndarray]
  measure_without: Callable[[Sequence[str]], np.ndarray] | None = None


def measure_all_layers(
  traced: _tracing.TracedFunction,
  noise_mask: np.ndarray,
  progress: _progress.ProgressLine,
) -> LayerEffects:
  """Run a function once for each layer, with this layer in half precision.

  Args:
    traced: the function.
    noise_mask: the arrays that are only rounding noise; bool[arrays].
    progress: shows how far it is.
  """
  layers = _layers.list_rounding_layers(traced.closed_jaxpr)
  program = _reference_program.ReferenceProgram(
    traced.closed_jaxpr, traced.inputs, layers, has_flags=True
  )
  run_numbers = itertools.count(1)

  def run(half_layers: Sequence[int]) -> _reference_program.RunResult:
    progress.set_description(f"measuring layers, run {next(run_numbers)}")
    return jax.block_until_ready(program.run(traced.inputs, half_layers))

  reference = run(())
  comparison = _errors.OutputComparison(traced.outputs, reference.outs)

  def measure(half_layers: Sequence[int]) -> np.ndarray:
    errors = comparison.compute_errors(run(half_layers).outs)
    return comparison.compute_effects(errors, noise_mask)

  effects = [measure([i]) for i, _ in enumerate(layers)]
  stats = _host_values.to_host(reference.stats)
  return LayerEffects(
    [_make_row(layers, stats, *x) for x in enumerate(effects)],
    effects,
    lambda names: measure(
      [i for i, x in enumerate(layers) if x.name not in names]
    ),
  )


def explain_overflow(reference: ReferenceRun) -> LayerEffects:
  """Return the matmuls that overflow, with an infinite effect."""
  effect = np.where(np.isinf(reference.compute_effects()), math.inf, 0.0)
  rows = [
    _make_row(reference.layers, reference.stats, i, effect)
    for i, _ in enumerate(reference.layers)
  ]
  overflowing = [row for row in rows if row.overflows]
  return LayerEffects(overflowing, [effect] * len(overflowing))


def _make_row(
  layers: Sequence[_layers.Layer],
  stats: Mapping[int, _layers.LayerStats],
  index: int,
  effect: np.ndarray,
) -> _reports.LayerPrecision:
  """Return the row of the report on a layer."""
  layer, layer_stats = layers[index], stats[index]
  amax = float(layer_stats.amax)
  log2_max = math.log2(float(jnp.finfo(layer.dtype).max))
  return layer.as_row(
    isolated_error=float(effect[0]),
    log2_headroom=log2_max - math.log2(amax) if amax else math.inf,
    program_index=index,
    **{k: float(x) for k, x in layer_stats._asdict().items()},
  )
