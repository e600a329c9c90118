"""The errors of what is compared if one product alone is in half precision."""

from collections.abc import Callable, Sequence
import math

import numpy as np

# Of the squares of all errors, what is below this share is not looked into.
_SHARE = 0.3

# A place stands out if its effect is as many times the spacing of numbers at 1,
# and as many times that of all lesser places together. In float16 the first is
# an error of 0.016, at which the cosine is 0.9999. Layers in front of batch
# normalization may be far above it, but are about as bad as their neighbours.
_TIMES_EPS = 16.0
# Of a single array, it is as many times the spacing. Those of models that learn
# well are off by up to two thirds of that.
FAR_OFF = 64.0
_TIMES_OTHERS = 4.0
# What many places share is no fault of one. There may always be one.
_FEW = 1 / 2

# The errors if these rows run in half precision: of all together, and then of
# each array.
Measure = Callable[[list[int]], np.ndarray]


def worst(
  measure: Measure, places: Sequence[list[int]], total: np.ndarray, eps: float
) -> dict[int, np.ndarray]:
  """The largest effects, by halves: in far fewer runs than there are rows.

  Errors that have nothing to do with each other add up in squares. So a half of
  the places that makes less than a share of the whole is not looked into.

  Args:
    measure: the errors if these rows run in half precision.
    places: the rows of each place.
    total: the errors if all of them do.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    For each row, its effects; of what was not looked into its equal share.
  """
  # No place can stand out for another array.
  looked_at = total > FAR_OFF * eps
  looked_at[0] = True
  effects: dict[int, np.ndarray] = {}
  parts = [(places, total)]
  while parts:
    part, effect = parts.pop()
    rows = [row for rows in part for row in rows]
    is_large = (effect > math.sqrt(_SHARE) * total) | ~np.isfinite(effect)
    matters = bool((is_large & looked_at).any())
    if len(rows) == 1 or not matters:
      effects.update((row, effect / math.sqrt(len(rows))) for row in rows)
    elif len(part) <= 1:
      effects.update((row, measure([row])) for row in rows)
    else:
      middle = len(part) // 2
      for half in part[:middle], part[middle:]:
        parts.append((half, measure([row for rows in half for row in rows])))
  return effects


def standing_out(
  names: Sequence[str], effects: np.ndarray, eps: float
) -> tuple[str, ...]:
  """The few places that do far more harm to an array than all others together.

  Each array is judged by itself: an optimizer such as Adam takes each relative
  to itself, so that a small gradient moves its parameters as far as any other.

  Args:
    names: the name of the place of each product, of which there is one at
      least.
    effects: the effect of each on all arrays together, and on each by itself;
      float64[products, 1 + arrays].
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    Their names, the worst first; of equal ones, the one that came first. What
    makes an array that is not finite is always among them.
  """
  places = list(dict.fromkeys(names))
  sizes = np.zeros((len(places), effects.shape[1]))
  for name, effect in zip(names, effects, strict=True):
    i = places.index(name)
    sizes[i] = np.hypot(sizes[i], effect)
  worst: dict[str, float] = {}
  for column, its_sizes in enumerate(sizes.T):
    least = (FAR_OFF if column else _TIMES_EPS) * eps
    for i in _far_above_the_others(its_sizes, least):
      worst[places[i]] = max(worst.get(places[i], 0.0), its_sizes[i])
  found = sorted(worst, key=places.index)
  found.sort(key=lambda name: worst[name], reverse=True)
  return tuple(filter(None, found))


def _far_above_the_others(sizes: np.ndarray, least: float) -> np.ndarray:
  """Which few are larger than the least, and far larger than all others."""
  order = np.argsort(-sizes, kind="stable")
  count = int(np.sum(~np.isfinite(sizes)))
  for i in range(count, max(1, math.floor(_FEW * len(sizes)))):
    others = math.hypot(*sizes[order[i + 1 :]])
    if sizes[order[i]] > max(least, _TIMES_OTHERS * others):
      count = i + 1
  return order[:count]
