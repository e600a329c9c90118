"""Measure all layers of a program, or those that overflow."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import (
  _progress,
  _reports,
  _tracing,
)
from optax_lossscale.diagnostics._precision import _layers, _runs


class MeasuredLayers(NamedTuple):
  """The layers of a program that were measured.

  Attributes:
    layers: all layers.
    effect_by_layer: for each measured layer, by its index: the error of all
      arrays together, and then of each, if this layer alone runs in half
      precision; float64[1 + arrays].
    stats: the statistics of these layers.
    runs: the program that measured them; None if they were not measured.
  """

  layers: list[_layers.Layer]
  effect_by_layer: dict[int, np.ndarray]
  stats: dict[int, _layers.LayerStats]
  runs: _runs.LayerRuns | None = None

  def list_rows(self) -> list[_reports.LayerPrecision]:
    """Return a row for each measured layer."""
    return [self._as_row(i) for i in self.effect_by_layer]

  def _as_row(self, index: int) -> _reports.LayerPrecision:
    layer, stats = self.layers[index], self.stats[index]
    return layer.as_row(
      isolated_error=float(self.effect_by_layer[index][0]),
      log2_headroom=_compute_log2_headroom(layer, stats),
      program_index=index,
      **{k: float(x) for k, x in stats._asdict().items()},
    )

  def measure_without(self, names: Sequence[str]) -> np.ndarray:
    """Run all layers but these in half precision, and return their effects."""
    assert self.runs is not None
    others = (i for i, x in enumerate(self.layers) if x.name not in names)
    return self.runs.measure_effects(list(others))


def measure_all_layers(
  traced: _tracing.TracedFunction,
  runs: _runs.ReferenceRuns,
  progress: _progress.ProgressLine,
) -> MeasuredLayers:
  layers = _layers.list_rounding_layers(traced.closed_jaxpr)
  indices = range(len(layers))
  layer_runs = _runs.LayerRuns(traced, layers, runs.noise_mask, progress)
  effects = {i: layer_runs.measure_effects([i]) for i in indices}
  return MeasuredLayers(layers, effects, layer_runs.stats, layer_runs)


def explain_overflow(runs: _runs.ReferenceRuns) -> MeasuredLayers:
  """Return the matmuls that overflow, with an infinite effect."""
  effect = np.where(np.isinf(runs.half_effects), math.inf, 0.0)
  is_overflow = lambda i: (
    _compute_log2_headroom(runs.layers[i], runs.stats[i]) < 0
  )
  effects = dict.fromkeys(filter(is_overflow, runs.stats), effect)
  return MeasuredLayers(runs.layers, effects, runs.stats)


def _compute_log2_headroom(
  layer: _layers.Layer, stats: _layers.LayerStats
) -> float:
  """Return log2 of the largest number over the largest magnitude."""
  dtype_max = float(jnp.finfo(layer.dtype).max)
  amax = float(stats.amax)
  return math.log2(dtype_max) - math.log2(amax) if amax else math.inf
