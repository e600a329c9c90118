"""Which errors are large, and which layers stand out.

The effect of a layer is the error of each array if this layer alone runs in
half precision. A layer is an outlier if its effect is some times as large as
all smaller ones together.
"""

from collections.abc import Sequence
import math

import numpy as np

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
