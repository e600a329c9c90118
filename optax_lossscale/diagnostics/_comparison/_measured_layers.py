"""Measure all layers of a program, or those that cause an error."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import _eqns
from optax_lossscale.diagnostics import (
  _progress,
  _reports,
  _tracing,
)
from optax_lossscale.diagnostics._comparison import (
  _layers,
  _outliers,
  _output_errors,
  _runs,
)

# Of the arrays with at least this fraction of the largest error, one is
# explained; and at most so many layers are described.
_WORST_FRACTION = 0.5
_MAX_EXPLAINED = 8


class MeasuredLayers(NamedTuple):
  """The layers of a program that were measured.

  Attributes:
    table: all layers.
    effect_by_layer: for each measured layer, by its index: the error of all
      arrays together, and then of each, if this layer alone runs in half
      precision; float64[1 + arrays].
    stats: the statistics of some layers.
    runs: the program that measured them; None if they were not measured.
  """

  table: _layers.LayerTable
  effect_by_layer: dict[int, np.ndarray]
  stats: dict[int, _layers.LayerStats]
  runs: _runs.LayerRuns | None = None

  def measure_without(self, names: Sequence[str]) -> np.ndarray:
    """Run all layers but these in half precision, and return their effects."""
    assert self.runs is not None
    others = (i for i, x in enumerate(self.table.layers) if x.name not in names)
    return self.runs.measure_effects(list(others))


def measure_all_layers(
  traced: _tracing.TracedFunction,
  runs: _runs.ReferenceRuns,
  progress: _progress.ProgressLine,
) -> MeasuredLayers:
  table = _layers.LayerTable(traced.closed_jaxpr)
  indices = range(len(table.layers))
  layer_runs = _runs.LayerRuns(
    traced, table, runs.noise_mask, progress, measured=indices
  )
  effects = {i: layer_runs.measure_effects([i]) for i in indices}
  return MeasuredLayers(table, effects, layer_runs.stats, layer_runs)


def explain_overflow(
  table: _layers.LayerTable, runs: _runs.ReferenceRuns
) -> MeasuredLayers:
  """Return the matmuls that overflow, with an infinite effect."""
  effect = np.where(np.isinf(runs.half_effects), math.inf, 0.0)
  is_overflow = lambda i: (
    _compute_log2_headroom(table.layers[i], runs.stats[i]) < 0
  )
  effects = dict.fromkeys(filter(is_overflow, runs.stats), effect)
  return MeasuredLayers(table, effects, runs.stats)


def search_layers(
  traced: _tracing.TracedFunction,
  runs: _runs.ReferenceRuns,
  progress: _progress.ProgressLine,
  eps: float,
) -> MeasuredLayers:
  """Find the layers that cause a large error by bisection.

  A single array is compared if the error of any is large: of the worst ones,
  the one on which the fewest operations depend. So less is compiled.
  """
  effect, noise_mask = runs.half_effects, runs.noise_mask
  worst_index = _select_array(traced, runs, eps)
  if worst_index is not None:
    output_index = _output_errors.list_compared_indices(traced.outputs)[
      worst_index
    ]
    traced = traced.restrict_outputs(
      [i == output_index for i in range(len(traced.outputs))]
    )
    effect, noise_mask = effect[[1 + worst_index] * 2], np.zeros(1, bool)
  table = _layers.LayerTable(traced.closed_jaxpr)
  layer_runs = _runs.LayerRuns(traced, table, noise_mask, progress)
  effects = _outliers.bisect_effects(
    layer_runs.measure_effects, table.group_by_name(), effect, eps
  )
  worst_layers = sorted(effects, key=lambda i: effects[i].max(), reverse=True)
  stats = _runs.measure_stats(traced, table, worst_layers[:_MAX_EXPLAINED])
  return MeasuredLayers(table, effects, stats, layer_runs)


def _select_array(
  traced: _tracing.TracedFunction, runs: _runs.ReferenceRuns, eps: float
) -> int | None:
  """Return the index of the array to explain; None if all of them are."""
  errors = runs.half_effects[1:]
  is_large = _outliers.find_large_errors(runs.half_effects, eps)[1:]
  if not is_large.any():
    return None
  # An error that any rounding may cause says little about layers.
  if (is_large & ~runs.amplified_mask).any():
    is_large &= ~runs.amplified_mask
  is_large &= errors >= _WORST_FRACTION * errors[is_large].max()
  indices = _output_errors.list_compared_indices(traced.outputs)

  def count_eqns(i: int) -> int:
    mask = [j == indices[i] for j in range(len(traced.outputs))]
    return len(_eqns.live_eqns(traced.closed_jaxpr.jaxpr, mask))

  return min(np.flatnonzero(is_large).tolist(), key=count_eqns)


def as_row(layers: MeasuredLayers, index: int) -> _reports.LayerPrecision:
  layer, stats = layers.table.layers[index], layers.stats.get(index)
  measurements: dict[str, float] = {}
  if stats is not None:
    measurements = {k: float(x) for k, x in stats._asdict().items()}
    measurements["log2_headroom"] = _compute_log2_headroom(layer, stats)
  names = layer.location.names
  return _reports.LayerPrecision(
    primitive=layer.primitive,
    name=layer.name,
    name_scope=names.name_scope,
    param_path=names.param_path,
    source_line=layer.source_line,
    backward=layer.location.is_backward,
    dtype=str(layer.dtype),
    in_autocast=layer.in_autocast,
    run_count=layer.run_count,
    flops=layer.flops,
    isolated_error=float(layers.effect_by_layer[index][0]),
    program_index=index,
    **measurements,
  )


def _compute_log2_headroom(
  layer: _layers.Layer, stats: _layers.LayerStats
) -> float:
  """Return log2 of the largest number over the largest magnitude."""
  dtype_max = float(jnp.finfo(layer.dtype).max)
  amax = float(stats.amax)
  return math.log2(dtype_max) - math.log2(amax) if amax else math.inf
