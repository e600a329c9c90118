"""Decide which errors are large, and which layers and loss scales explain them.

All functions take plain numbers. The effects of a run are the error of all
arrays together, and then of each.
"""

from collections.abc import Callable, Sequence
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
  return effects > _make_thresholds(len(effects), eps, _LARGE_EPS)


def _make_thresholds(size: int, eps: float, total_eps: float) -> np.ndarray:
  thresholds = np.full(size, _INACCURATE_EPS * eps)
  thresholds[:1] = total_eps * eps
  return thresholds


def may_be_expected(error: float, array_errors: np.ndarray, eps: float) -> bool:
  """Return whether an error is so large that one asks whether it is expected.

  Args:
    error: the error of all arrays together.
    array_errors: the error of each; float64[arrays].
    eps: the spacing of numbers at 1 in half precision.
  """
  is_large = exceeds_limits(np.array([error, *array_errors]), eps)
  # Half precision makes noise of numbers that are less exact by far.
  return bool(is_large.any() or (array_errors > _NOISE_THRESHOLD).any())


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


def compute_log2_excess(log2_headrooms: Sequence[float]) -> int:
  """Return log2 of the factor by which layers overflow at most, or 0.

  It suggests a loss scale where none is an argument, so that none was tried.
  """
  excess = -min(log2_headrooms, default=0.0)
  return math.ceil(excess) if 0 < excess < math.inf else 0


def compute_log2_shortfall(
  layers: Sequence[tuple[float, float, float]], eps: float
) -> int:
  """Return log2 of a loss scale with which layers do not underflow, or 0.

  Args:
    layers: for each layer in the backward pass, its error alone, the fraction
      of entries that are zero or subnormal, and log2 of its headroom.
    eps: the spacing of numbers at 1 in half precision.
  """
  if not any(
    error > _OUTLIER_EPS * eps and fraction > _MAX_SUBNORMAL_FRACTION
    for error, fraction, _ in layers
  ):
    return 0
  headroom = min(headroom for _, _, headroom in layers)
  return max(math.floor(headroom) - _LOG2_MARGIN, 0)


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
    threshold = (_INACCURATE_EPS if column else _OUTLIER_EPS) * eps
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
