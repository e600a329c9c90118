"""Reading what another system wrote, by a table of its keys in our words.

Input comes out of files and is not trusted: it is only looked at, by the names
that are known, never imported, called or evaluated. Messages quote it through
:func:`show`, since the `repr` of some objects raises, recurses or is endless.
"""

from collections.abc import Collection, Mapping
import reprlib
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale import _checks

_REQUIRED: Any = object()


class Key(NamedTuple):
  """What a key of another system stands for.

  Attributes:
    word: our word for it.
    default: what it is if it is left out or None; if there is no default, it
      must be given.
  """

  word: str
  default: Any = _REQUIRED


_SCALE = _checks.MIN_LOSS_SCALE, _checks.MAX_LOSS_SCALE, False
_COUNT = 1, _checks.MAX_COUNT, True
_TALLY = 0, _checks.MAX_COUNT, True
# What a number is between, and whether it is an integer, by our word for it.
_NUMBERS = {
  "init_scale": _SCALE,
  "loss_scale": _SCALE,
  "max_scale": _SCALE,
  "min_scale": _SCALE,
  "scale": _SCALE,
  "threshold": _SCALE,
  "growth_factor": (_checks.MIN_GROWTH_FACTOR, _checks.MAX_LOSS_SCALE, False),
  "backoff_factor": (_checks.MIN_LOSS_SCALE, _checks.MAX_BACKOFF_FACTOR, False),
  "tolerance": (0, 2**15, False),
  "growth_interval": _COUNT,
  "hysteresis": _COUNT,
  "finite_count": _TALLY,
  "overflows": _TALLY,
  # Trackers go on counting below zero.
  "hysteresis_remaining": (-_checks.MAX_COUNT, _checks.MAX_COUNT, True),
  # Flax has one less than the growth interval.
  "last_count": (0, _checks.MAX_COUNT - 1, True),
  # DeepSpeed has 0 for a scale that moves, a power for the first one, and the
  # numbers of steps from -1 on.
  "scale_or_zero": (0, _checks.MAX_LOSS_SCALE, False),
  "exponent": (0, 126, True),
  "step": _TALLY,
  "overflow_step": (-1, _checks.MAX_COUNT, True),
  "loss_id": _TALLY,
}
_BOOLEANS = "dynamic", "enabled", "consecutive_hysteresis"


def read(
  function: str,
  what: str,
  source: Any,
  keys: Mapping[str, Key],
  ignored: Collection[str] = (),
) -> dict[str, Any]:
  """The values of a mapping, or of an object's attributes, by our words.

  Args:
    function: the public function that reads, for the messages.
    what: what is read, for the messages.
    source: a mapping, in which every key must be known; or an object, which may
      have other attributes.
    keys: what each key or attribute stands for.
    ignored: keys that may be there, and are read past.

  Returns:
    The values, or their defaults: Python numbers within the bounds of their
    word. What is neither a number nor a bool by its word is as it was.
  """
  found = _found(function, what, source, keys, ignored)
  given = {key: x for key, x in found.items() if x is not None}
  required = [key for key, x in keys.items() if x.default is _REQUIRED]
  missing = [key for key in required if key not in given]
  if missing:
    raise ValueError(
      f"{function}: {what} must hold {', '.join(required)}, but"
      f" {', '.join(missing)} is missing."
    )
  return {
    word: as_word(function, what, key, given[key], word)
    if key in given
    else default
    for key, (word, default) in keys.items()
  }


def as_word(function: str, what: str, key: str, value: Any, word: str) -> Any:
  """A value as the number or the bool that our word for it asks for."""
  value = _plain(value)
  if word in _BOOLEANS:
    rule, is_kind, is_right = "True or False", isinstance(value, bool), True
  elif word in _NUMBERS:
    low, high, integer = _NUMBERS[word]
    rule = _checks.format_range(low, high, integer=integer)
    is_kind = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is in no range.
    is_right = is_kind and low <= value <= high
    is_right = is_right and (not integer or value == int(value))
  else:
    return value
  if not (is_kind and is_right):
    error = ValueError if is_kind else TypeError
    raise error(
      f"{function}: {key} in {what} must be {rule}, got {key} = {show(value)}."
    )
  if isinstance(value, bool):
    return value
  return int(value) if _NUMBERS[word][2] else float(value)


def show(value: Any) -> str:
  """A short text for a message, whatever the value is."""
  try:
    return _SHORT.repr(value)
  except ValueError:  # Python does not print integers of thousands of digits.
    return f"a value of type {type(value).__name__} that is too long to print"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def _found(
  function: str,
  what: str,
  source: Any,
  keys: Mapping[str, Key],
  ignored: Collection[str],
) -> dict[str, Any]:
  """The values under known keys, as they are."""
  known = ", ".join(keys) or "none"
  if isinstance(source, Mapping):
    for key in source:
      if not (isinstance(key, str) and (key in keys or key in ignored)):
        past = f" Ignored keys: {', '.join(ignored)}." if ignored else ""
        raise ValueError(
          f"{function}: unknown key {show(key)} in {what}. Known keys:"
          f" {known}.{past}"
        )
    return {key: source[key] for key in keys if key in source}
  found = {}
  for key in keys:
    try:
      found[key] = getattr(source, key)
    except (AttributeError, KeyError):  # Of some, the attributes are keys.
      continue
  if not found:
    raise TypeError(
      f"{function}: {what} must be a dict, or an object with some of these"
      f" attributes: {known}; got {show(source)}."
    )
  return found


def _plain(value: Any) -> Any:
  """The Python number in an array of one element, and all else as it is."""
  try:
    array = np.asarray(value) if hasattr(value, "__array__") else None
    return value if array is None or array.size != 1 else array.item()
  except Exception:  # On another device, traced, or hostile: what it is.
    return value
