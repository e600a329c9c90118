"""Decide which errors are large, and which layers and loss scales explain them.

All functions take plain numbers, or rows of a report. The effects of a run are
the error of all arrays together, and then of each.
"""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np

from optax_lossscale.diagnostics import _reports

# A layer is an outlier if its effect is above OUTLIER_EPS times the spacing of
# numbers at 1, and above _OUTLIER_RATIO times the effect of all lesser layers
# together. In float16 the first is an error of 0.016.
# Layers in front of batch normalization may be far above it, but not above
# their neighbours.
OUTLIER_EPS = 16.0
# For a single array the limit is higher: in models that learn well, the errors
# of single arrays reach two thirds of it.
_INACCURATE_EPS = 64.0
_OUTLIER_RATIO = 4.0
# At most this fraction of the layers (but at least one) may be outliers: an
# error that most layers share is not the fault of a single one.
_MAX_OUTLIER_FRACTION = 1 / 2
# Above this limit, the error of all arrays together is large in any case. Sound
# models are below 12 in float16 and in bfloat16.
_LARGE_EPS = 32.0
# An array whose relative error is above this if operands change by a relative
# 2**-20 is rounding noise in float32, too.
_NOISE_THRESHOLD = 0.05
# An error is expected if it is at most this many times as large as the error
# that rounding causes in matmul operands and casts alone. Other operations
# round, too.
_MAX_AMPLIFIED_ROUNDINGS = 4.0
# Powers of two by which the loss scale is raised to find an underflow.
_LOG2_INCREASES = (4, 8, 12, 16, 20, 24)
# If more entries of an array are zero or subnormal, they explain its error.
_MAX_SUBNORMAL_FRACTION = 0.25
# How far a loss scale stays below one that overflows, as a power of two.
_LOG2_MARGIN = 2
# An error that is smaller by this factor with another loss scale is an
# underflow.
_MIN_IMPROVEMENT = 2.0


def find_large_errors(
  effects: np.ndarray, eps: float, total_eps: float = _LARGE_EPS
) -> np.ndarray:
  """Return whether each error is too large for the dtype.

  Args:
    effects: the error of all arrays together, and then of each; float64[n].
    eps: the spacing of numbers at 1 in half precision.
    total_eps: the limit of the error of all arrays together, as a multiple of
      ``eps``. With ``OUTLIER_EPS``, it is large if it can have an outlier.
  """
  return effects > _make_thresholds(len(effects), eps, total_eps)


def _make_thresholds(size: int, eps: float, total_eps: float) -> np.ndarray:
  thresholds = np.full(size, _INACCURATE_EPS * eps)
  thresholds[:1] = total_eps * eps
  return thresholds


def may_be_expected(array_errors: np.ndarray) -> bool:
  """Return whether an error is so large that one asks whether it is expected.

  Half precision makes noise of numbers that are less exact by far.
  """
  return bool((array_errors > _NOISE_THRESHOLD).any())


def find_expected_errors(
  array_errors: np.ndarray,
  perturbed_errors: np.ndarray,
  amplification: np.ndarray,
  eps: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Return which arrays are rounding noise, and which have an expected error.

  Args:
    array_errors: the error of each array as trained; float64[arrays].
    perturbed_errors: its error in float32, with perturbed operands.
    amplification: these errors over the perturbation.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    Two masks; bool[arrays] each. Expected errors are large ones that are no
    noise.
  """
  # A rounding changes a number by half of the spacing at most.
  expected_errors = _MAX_AMPLIFIED_ROUNDINGS * amplification * eps / 2
  is_noise = perturbed_errors > _NOISE_THRESHOLD
  is_large = array_errors > _INACCURATE_EPS * eps
  return is_noise, is_large & (array_errors <= expected_errors) & ~is_noise


def find_log2_increase(
  half_effects: np.ndarray,
  measure_at: Callable[[int], np.ndarray],
  eps: float,
) -> int:
  """Return log2 of a factor on the loss scale that makes errors smaller, or 0.

  Each error is compared with its limit, since some may be due to a layer.

  Args:
    half_effects: the effects as trained.
    measure_at: returns the effects with a loss scale that is larger by a power
      of two.
    eps: the spacing of numbers at 1 in half precision.
  """
  limits = _make_thresholds(len(half_effects), eps, _LARGE_EPS)
  excess_by_increase = {0: float(np.max(half_effects / limits))}
  for log2_increase in _LOG2_INCREASES:
    excess = float(np.max(measure_at(log2_increase) / limits))
    if not math.isfinite(excess):
      break
    excess_by_increase[log2_increase] = excess
  best = max(min(excess_by_increase.values()), 1.0)
  if excess_by_increase[0] < _MIN_IMPROVEMENT * best:
    return 0
  return next(k for k, x in excess_by_increase.items() if x <= 1.1 * best)


class Causes(NamedTuple):
  """The causes of errors.

  Attributes:
    layers: the rows of all measured layers, the largest error first.
    overflowing: the names of the layers that overflow in the forward pass, the
      one with the largest numbers first.
    outliers: the names of the layers with far larger errors than all others.
    log2_scale_change: log2 of the factor by which to change the loss scale; 0
      if it is not the cause.
    is_amplified: whether the function amplifies any rounding, and nothing else
      causes the errors of some arrays.
  """

  layers: tuple[_reports.LayerPrecision, ...] = ()
  overflowing: tuple[str, ...] = ()
  outliers: tuple[str, ...] = ()
  log2_scale_change: int = 0
  is_amplified: bool = False


def find_causes(
  rows: Sequence[_reports.LayerPrecision],
  row_effects: Sequence[np.ndarray],
  effects: np.ndarray,
  eps: float,
  *,
  log2_scale_change: int = 0,
  tried_scales: bool = False,
) -> Causes:
  """Return which layers, or which loss scale, cause errors.

  A layer that overflows in the forward pass is the cause, whatever the loss
  scale is; else a loss scale with which the errors are small; else outliers.

  Args:
    rows: the rows of the measured layers, without errors.
    row_effects: the effect of each; float64[1 + arrays].
    effects: the effects of all layers together.
    eps: the spacing of numbers at 1 in half precision.
    log2_scale_change: log2 of the change of the loss scale that helped; 0 if
      none did, or none was tried.
    tried_scales: whether a loss scale was changed that acts.
  """
  # If errors are equal, such as inf, the layer with the largest numbers is
  # first.
  pairs = sorted(
    (
      (row._replace(isolated_error=float(effect[0])), effect)
      for row, effect in zip(rows, row_effects, strict=True)
    ),
    key=lambda pair: (-pair[1][0], -(pair[0].amax or 0.0)),
  )
  overflowing = [
    row
    for row, effect in pairs
    if row.overflows
    and row.name
    and not row.backward
    and find_large_errors(effect, eps, OUTLIER_EPS).any()
  ]
  overflowing.sort(key=lambda row: row.log2_headroom or 0.0)
  if not overflowing and not log2_scale_change:
    log2_scale_change = _suggest_log2_scale_change(
      [row for row, _ in pairs if row.backward], effects, eps, tried_scales
    )
  outliers: tuple[str, ...] = ()
  # If the backward pass overflows, the errors of all layers are infinite.
  if pairs and log2_scale_change >= 0:
    names, columns = zip(*((row.name, x) for row, x in pairs), strict=True)
    outliers = find_outliers(names, np.array(columns), eps)
  return Causes(
    layers=tuple(row for row, _ in pairs),
    overflowing=tuple(dict.fromkeys(row.name for row in overflowing)),
    outliers=outliers,
    log2_scale_change=log2_scale_change,
  )


def _suggest_log2_scale_change(
  rows: Sequence[_reports.LayerPrecision],
  effects: np.ndarray,
  eps: float,
  tried_scales: bool,
) -> int:
  """Return log2 of a factor on the loss scale with which layers stay in range.

  Args:
    rows: the rows of the layers in the backward pass.
    effects: the effects of all layers together.
    eps: the spacing of numbers at 1 in half precision.
    tried_scales: whether a larger loss scale was tried, and did not help.
  """
  headroom = min((row.log2_headroom or 0.0 for row in rows), default=0.0)
  if not math.isfinite(effects[0]):
    return math.floor(min(headroom, 0.0))
  underflows = any(
    (row.isolated_error or 0.0) > OUTLIER_EPS * eps
    and (row.underflow_fraction or 0.0) + (row.subnormal_fraction or 0.0)
    > _MAX_SUBNORMAL_FRACTION
    for row in rows
  )
  if (
    tried_scales or not underflows or not find_large_errors(effects, eps).any()
  ):
    return 0
  return max(math.floor(headroom) - _LOG2_MARGIN, 0)


def is_amplified(
  causes: Causes,
  effects: np.ndarray,
  measure_without: Callable[[Sequence[str]], np.ndarray] | None,
  eps: float,
) -> bool:
  """Return whether errors that any rounding may cause have no other cause.

  Args:
    causes: the causes of all errors.
    effects: the errors as trained without the arrays with these errors.
    measure_without: returns the errors without some layers; None if no layer
      was run.
    eps: the spacing of numbers at 1 in half precision.
  """
  if causes.log2_scale_change or causes.overflowing:
    return False
  if not causes.outliers or measure_without is None:
    return True
  # Outliers are to blame if the errors are small without them.
  remaining = measure_without(causes.outliers)
  is_fixed = not find_large_errors(remaining, eps).any()
  return not is_fixed and not find_large_errors(effects, eps).any()


def find_outliers(
  names: Sequence[str], effects: np.ndarray, eps: float
) -> tuple[str, ...]:
  """Return the few layers whose effect is far above all lesser ones together.

  Each array is judged individually: an optimizer such as Adam scales a gradient
  relative to its size, so a small gradient moves its parameters as far as
  others.

  Args:
    names: the name of each layer and pass; at least one.
    effects: the effect of each of them on all arrays together, and on each
      array; float64[layers, 1 + arrays].
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    The names of the outliers, the worst first, and equal ones in the order of
    ``names``. A layer that makes an array nonfinite is always an outlier.
  """
  norms: dict[str, np.ndarray] = {}
  for name, effect in zip(names, effects, strict=True):
    norms[name] = np.hypot(norms.get(name, 0.0), effect)
  columns = np.stack([*norms.values()], axis=1)
  worst_norms = np.zeros(len(norms))
  thresholds = _make_thresholds(len(columns), eps, OUTLIER_EPS)
  for column, threshold in zip(columns, thresholds, strict=True):
    outliers = _find_outlier_indices(column, threshold)
    worst_norms[outliers] = np.maximum(worst_norms, column)[outliers]
  order = np.argsort(-worst_norms, kind="stable")
  return tuple(
    name
    for name, norm in ((list(norms)[i], worst_norms[i]) for i in order)
    if name and norm
  )


def _find_outlier_indices(norms: np.ndarray, threshold: float) -> np.ndarray:
  """Return the indices of outliers: above the threshold, and above the others.

  Nonfinite norms are always outliers, and come first in the order.
  """
  order = np.argsort(-norms, kind="stable")
  num_outliers = int(np.sum(~np.isfinite(norms)))
  for i in range(
    num_outliers, max(1, math.floor(_MAX_OUTLIER_FRACTION * len(norms)))
  ):
    others_norm = math.hypot(*norms[order[i + 1 :]])
    if norms[order[i]] > max(threshold, _OUTLIER_RATIO * others_norm):
      num_outliers = i + 1
  return order[:num_outliers]
