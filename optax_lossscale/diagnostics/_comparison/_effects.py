"""The error of the results if one product alone runs in half precision."""

from collections.abc import Callable
import math

# Of the squares of all errors, what is below this share is not looked into.
_SHARE = 0.3


def each(
  measure: Callable[[list[int]], float], count: int, total: float
) -> dict[int, float]:
  """The effect of each row.

  Args:
    measure: the error if these rows run in half precision.
    count: how many rows there are.
    total: the error if all of them do; not needed.

  Returns:
    For each row, its effect.
  """
  del total
  return {row: measure([row]) for row in range(count)}


def worst(
  measure: Callable[[list[int]], float], count: int, total: float
) -> dict[int, float]:
  """The largest effects, by halves: in far fewer runs than there are rows.

  Errors that have nothing to do with each other add up in squares. So a half of
  the rows that makes less than a share of the whole is not looked into.

  Args:
    measure: the error if these rows run in half precision.
    count: how many rows there are.
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


def _matters(effect: float, total: float) -> bool:
  if not math.isfinite(effect):
    return True
  return math.isfinite(total) and effect**2 > _SHARE * total**2
