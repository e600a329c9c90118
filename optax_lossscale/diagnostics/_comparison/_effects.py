"""The error of the results if one product alone runs in half precision."""

from collections.abc import Callable, Iterable
import math
from typing import NamedTuple

# Of the squares of all errors, what is below this share is not looked into.
_SHARE = 0.3

# A place stands out if its effect is more than as many units in the last place,
# and as many times that of all lesser places together. In float16 the first is
# an error of 0.016, at which the cosine is 0.9999. Early layers in front of
# batch normalization may be far above it, but are at most as bad as the others
# together.
_UNITS = 16.0
_TIMES_OTHERS = 4.0
# Places that many share are not few. There may always be one.
_FEW = 1 / 3


class Effect(NamedTuple):
  """The error of the results if one row alone runs in half precision.

  Attributes:
    measured: that error; None if the row was not looked into.
    about: the same, or about as much if it is only known of several rows.
  """

  measured: float | None
  about: float


def each(
  measure: Callable[[list[int]], float], count: int, total: float
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
  effects = ((row, measure([row])) for rows in places for row in rows)
  return {row: Effect(effect, effect) for row, effect in effects}


def worst(
  measure: Callable[[list[int]], float], count: int, total: float
) -> dict[int, float]:
  """The largest effects, by halves: in far fewer runs than there are rows.

  Errors that have nothing to do with each other add up in squares. So a half of
  the rows that makes less than a share of the whole is not looked into.

  Args:
    measure: the error if these rows run in half precision.
    places: the rows of each place.
    total: the error if all of them do.

  Returns:
    For each row, its effect; of what was not looked into its equal share.
  """
  effects: dict[int, float] = {}
  parts = [(list(range(count)), total)]
  while parts:
    rows, effect = parts.pop()
    if len(rows) > 1 and _matters(effect, total):
      middle = len(rows) // 2
      halves = rows[:middle], rows[middle:]
      parts += [(half, measure(half)) for half in halves]
    else:
      effects.update((row, effect / math.sqrt(len(rows))) for row in rows)
  return effects


def standing_out(
  effects: Iterable[tuple[str, float]], eps: float
) -> tuple[str, ...]:
  """The names of the few places that do far more harm than all others.

  Args:
    effects: for each row, the name of its place and its effect; those that
      overflow furthest before others that are not finite.
    eps: the distance of one to the next larger number in half precision.

  Returns:
    The names, the worst first. What makes results that are not finite is always
    among them.
  """
  of_places: dict[str, float] = {}
  for name, effect in effects:
    of_places[name] = math.hypot(of_places.get(name, 0.0), effect)
  names = sorted(of_places, key=lambda name: -of_places[name])
  overflowing = sum(not math.isfinite(x) for x in of_places.values())
  found, others = overflowing, 0.0
  few = max(1, math.floor(_FEW * len(names)))
  for count in range(len(names), overflowing, -1):
    effect = of_places[names[count - 1]]
    least = max(_UNITS * eps, _TIMES_OTHERS * others)
    if count <= few and effect > least:
      found = count
      break
    others = math.hypot(others, effect)
  return tuple(filter(None, names[:found]))


def _matters(effect: float, total: float) -> bool:
  if not math.isfinite(effect):
    return True
  return math.isfinite(total) and effect**2 > _SHARE * total**2
