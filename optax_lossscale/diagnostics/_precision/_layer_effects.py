"""Measure the layers of a program.

The effect of a layer is the error of each array if this layer alone runs in
half precision.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _progress,
  _reports,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _errors,
  _layers,
  _reference_program,
  _reference_runs,
)


class LayerEffects(NamedTuple):
  """The layers of a program that were measured.

  Attributes:
    layers: all layers.
    effect_by_layer: for each measured layer, by its index: the error of all
      arrays together, followed by that of each array, with only this layer in
      half precision; float64[1 + arrays].
    stats: the statistics of these layers.
    measure: returns the effect of some layers together; None if only their
      magnitudes were measured.
  """

  layers: list[_layers.Layer]
  effect_by_layer: dict[int, np.ndarray]
  stats: dict[int, _layers.LayerStats]
  measure: Callable[[Sequence[int]], np.ndarray] | None = None

  def list_rows(self) -> list[_reports.LayerPrecision]:
    """Return a row for each measured layer."""
    return [
      self.layers[i].as_row(
        isolated_error=float(effect[0]),
        log2_headroom=_compute_log2_headroom(self.layers[i], self.stats[i]),
        program_index=i,
        **{k: float(x) for k, x in self.stats[i]._asdict().items()},
      )
      for i, effect in self.effect_by_layer.items()
    ]

  def measure_without(self, names: Sequence[str]) -> np.ndarray:
    """Run all layers but these in half precision, and return their effect."""
    assert self.measure is not None
    others = [i for i, x in enumerate(self.layers) if x.name not in names]
    return self.measure(others)


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
  indices = range(len(layers))
  program = _reference_program.ReferenceProgram(
    traced.closed_jaxpr, traced.inputs, layers, indices, has_flags=True
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

  effects = {i: measure([i]) for i in indices}
  stats = _host_values.to_host(reference.stats)
  return LayerEffects(layers, effects, stats, measure)


def explain_overflow(reference: _reference_runs.ReferenceRun) -> LayerEffects:
  """Return the matmuls that overflow, with an infinite effect."""
  layers, stats = reference.layers, reference.stats
  effect = np.where(np.isinf(reference.compute_effects()), math.inf, 0.0)
  overflowing = [
    i for i, x in stats.items() if _compute_log2_headroom(layers[i], x) < 0
  ]
  return LayerEffects(layers, dict.fromkeys(overflowing, effect), stats)


def _compute_log2_headroom(
  layer: _layers.Layer, stats: _layers.LayerStats
) -> float:
  """Return log2 of the largest number over the largest magnitude."""
  dtype_max = float(jnp.finfo(layer.dtype).max)
  amax = float(stats.amax)
  return math.log2(dtype_max) - math.log2(amax) if amax else math.inf
