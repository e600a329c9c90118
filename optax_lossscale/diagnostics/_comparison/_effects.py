"""The error of the results if one product alone runs in half precision."""

from collections.abc import Callable, Mapping, Sequence
import math

# Of the squares of all errors, what is below this share is not looked into.
_SHARE = 0.3

# A place stands out if its effect is as many times the spacing of numbers at 1,
# and as many times that of all lesser places together. In float16 the first is
# an error of 0.016, at which the cosine is 0.9999. Layers in front of batch
# normalization may be far above it, but are about as bad as their neighbours.
_TIMES_EPS = 16.0
_TIMES_OTHERS = 4.0
# What many places share is no fault of one. There may always be one.
_FEW = 1 / 2

# The error if these rows run in half precision.
Measure = Callable[[list[int]], float]


def each(
  measure: Measure, places: Sequence[list[int]], total: float
) -> dict[int, float]:
  """The effect of each row.

  Args:
    measure: the error if these rows run in half precision.
    places: the rows of each place.
    total: the error if all of them do; not needed.

  Returns:
    For each row, its effect.
  """
  del total
  return {row: measure([row]) for rows in places for row in rows}


def worst(
  measure: Measure, places: Sequence[list[int]], total: float
) -> dict[int, float]:
  """The largest effects, by halves: in far fewer runs than there are rows.

  Errors that have nothing to do with each other add up in squares. So a half of
  the places that makes less than a share of the whole is not looked into.

  Args:
    measure: the error if these rows run in half precision.
    places: the rows of each place.
    total: the error if all of them do.

  Returns:
    For each row, its effect; of what was not looked into its equal share.
  """
  effects: dict[int, float] = {}
  parts = [(places, total)]
  while parts:
    part, effect = parts.pop()
    rows = [row for rows in part for row in rows]
    if len(rows) == 1 or not _matters(effect, total):
      effects.update((row, effect / math.sqrt(len(rows))) for row in rows)
    elif len(part) <= 1:
      effects.update(each(measure, part, total))
    else:
      middle = len(part) // 2
      for half in part[:middle], part[middle:]:
        parts.append((half, measure([row for rows in half for row in rows])))
  return effects


def _matters(effect: float, total: float) -> bool:
  if not math.isfinite(effect):
    return True
  return math.isfinite(total) and effect**2 > _SHARE * total**2


def standing_out(effects: Mapping[str, float], eps: float) -> list[str]:
  """The few places that do far more harm than all others together.

  Args:
    effects: the effect of each place, the largest first.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    Their names, the worst first. What makes results that are not finite is
    always among them.
  """
  sizes = list(effects.values())
  count = sum(not math.isfinite(size) for size in sizes)
  for i in range(count, max(1, math.floor(_FEW * len(sizes)))):
    others = math.hypot(*sizes[i + 1 :])
    if sizes[i:] and sizes[i] > max(_TIMES_EPS * eps, _TIMES_OTHERS * others):
      count = i + 1
  return list(effects)[:count]
