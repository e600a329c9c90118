"""The error of the results if one product alone runs in half precision."""

from collections.abc import Callable, Iterable, Sequence
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
    matters = effect > math.sqrt(_SHARE) * total or not math.isfinite(effect)
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
  effects: Iterable[tuple[str, float]], eps: float
) -> tuple[str, ...]:
  """The few places that do far more harm than all others together.

  Args:
    effects: the name of a place and the effect, for each product, of which
      there is one at least.
    eps: the spacing of numbers at 1 in half precision.

  Returns:
    Their names, the worst first; of equal ones, the one that came first. What
    makes results that are not finite is always among them.
  """
  of_places: dict[str, float] = {}
  for name, effect in effects:
    of_places[name] = math.hypot(of_places.get(name, 0.0), effect)
  names = sorted(of_places, key=lambda name: of_places[name], reverse=True)
  sizes = [of_places[name] for name in names]
  count = sum(not math.isfinite(size) for size in sizes)
  for i in range(count, max(1, math.floor(_FEW * len(sizes)))):
    others = math.hypot(*sizes[i + 1 :])
    if sizes[i] > max(_TIMES_EPS * eps, _TIMES_OTHERS * others):
      count = i + 1
  return tuple(filter(None, names[:count]))
