"""The search for the layers that cause an error.

The effect of a layer is the error of each array if this layer alone runs in
half precision. ``bisect_effects`` measures the large effects without a run for
each layer: independent errors add up in squares, so a half of the layers with a
small part of the total squared error needs no further runs. ``find_outliers``
compares the effect of each layer with all smaller ones together: a layer is an
outlier if its effect is some times as large.
"""

from collections.abc import Callable, Sequence
import heapq
import math

import numpy as np

# Bisection skips a half whose share of the total squared error is below this.
_MIN_ERROR_SHARE = 0.3
# Larger errors do not add up in squares, so a larger total counts as this.
_MAX_ADDITIVE_ERROR = 0.25
# If so many layers have large errors, no few of them are to blame.
_MAX_RUNS = 64
# A layer is an outlier if its effect is above _OUTLIER_EPS times the spacing of
# numbers at 1, and above _OUTLIER_RATIO times the effect of all lesser layers
# together. In float16 the first is an error of 0.016.
# Layers in front of batch normalization may be far above it, but not above
# their neighbours.
_OUTLIER_EPS = 16.0
# For a single array the limit is higher: in models that learn well, the errors
# of single arrays reach two thirds of it.
INACCURATE_EPS = 64.0
_OUTLIER_RATIO = 4.0
# At most this fraction of the layers (but at least one) may be outliers: an
# error that most layers share is not the fault of a single one.
_MAX_OUTLIER_FRACTION = 1 / 2
# Above this limit, the error of all arrays together is large in any case. Sound
# models are below 12 in float16 and in bfloat16.
_LARGE_EPS = 32.0
# Returns the errors if only these layers run in half precision: the error of
# all arrays together, and then of each array.
MeasureFn = Callable[[list[int]], np.ndarray]


def bisect_effects(
  measure: MeasureFn,
  layer_groups: Sequence[list[int]],
  total_effect: np.ndarray,
  eps: float,
) -> dict[int, np.ndarray]:
  """Measure large effects by bisection, in few runs.

  Independent errors add up in squares. So a half of the layers with less than
  ``_MIN_ERROR_SHARE`` of the total squared error is not split further.

  Args:
    measure: returns the errors if only these layers run in half precision.
    layer_groups: the two passes of each layer.
    total_effect: the errors if all layers run in half precision.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    The effects of each layer. Layers that were measured together have equal
    parts of their squared error.
  """
  can_be_outlier = exceeds_limits(total_effect, eps)
  min_effect = math.sqrt(_MIN_ERROR_SHARE) * np.minimum(
    total_effect, _MAX_ADDITIVE_ERROR
  )
  effects: dict[int, np.ndarray] = {}
  num_runs = 0
  # The worst half is split first, and has the largest effect: a heap returns
  # the smallest key. The counter orders equal ones.
  heap = [(-math.inf, 0, layer_groups, total_effect)]
  while heap:
    _, _, groups, effect = heapq.heappop(heap)
    layers = [layer for group in groups for layer in group]
    is_large = (effect > min_effect) | ~np.isfinite(effect)
    is_relevant = bool((is_large & can_be_outlier).any())
    if len(layers) == 1 or not is_relevant or num_runs >= _MAX_RUNS:
      share = effect / math.sqrt(max(len(layers), 1))
      effects.update((layer, share) for layer in layers)
      continue
    # The two passes of a layer are measured separately.
    groups = groups if len(groups) > 1 else [[layer] for layer in layers]
    middle = len(groups) // 2
    for half in groups[:middle], groups[middle:]:
      half_effect = measure([layer for group in half for layer in group])
      num_runs += 1
      worst = float(np.max(np.nan_to_num(half_effect, nan=math.inf)))
      heapq.heappush(heap, (-worst, num_runs, half, half_effect))
  return effects


def exceeds_limits(effects: np.ndarray, eps: float) -> np.ndarray:
  """Return whether each effect is so large that it can have an outlier.

  Args:
    effects: the error of all arrays together, and then of each; float64[n].
    eps: the spacing of numbers at 1 in half precision.
  """
  return effects > _make_thresholds(len(effects), eps, _OUTLIER_EPS)


def find_large_errors(effects: np.ndarray, eps: float) -> np.ndarray:
  """Return whether each error is too large for the dtype.

  Args:
    effects: the error of all arrays together, and then of each; float64[n].
    eps: the spacing of numbers at 1 in half precision.
  """
  return effects > make_limits(len(effects), eps)


def make_limits(size: int, eps: float) -> np.ndarray:
  """Return the limit of the error of all arrays together, and of each."""
  return _make_thresholds(size, eps, _LARGE_EPS)


def _make_thresholds(size: int, eps: float, total_eps: float) -> np.ndarray:
  thresholds = np.full(size, INACCURATE_EPS * eps)
  thresholds[:1] = total_eps * eps
  return thresholds


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
  unique_names = list(dict.fromkeys(names))
  norms = np.zeros((len(unique_names), effects.shape[1]))
  for name, effect in zip(names, effects, strict=True):
    i = unique_names.index(name)
    norms[i] = np.hypot(norms[i], effect)
  worst_norms: dict[str, float] = {}
  for column, column_norms in enumerate(norms.T):
    threshold = (INACCURATE_EPS if column else _OUTLIER_EPS) * eps
    for i in _find_outlier_indices(column_norms, threshold):
      worst_norms[unique_names[i]] = max(
        worst_norms.get(unique_names[i], 0.0), column_norms[i]
      )
  outliers = sorted(worst_norms, key=unique_names.index)
  outliers.sort(key=lambda name: worst_norms[name], reverse=True)
  return tuple(filter(None, outliers))


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
