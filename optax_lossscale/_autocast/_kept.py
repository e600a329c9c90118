"""Which products stay in float32 because the user named them."""

from collections.abc import Iterable
import difflib
import fnmatch
from typing import Any

from optax_lossscale import _jaxprs

_NEAREST = 5


class Kept:
  """The products that patterns select, by the names that reports print.

  Attributes:
    patterns: the patterns, as in ``fnmatch``.
    exact: those that are names, and so are no patterns.
    has_unseen: whether there are products whose names cannot be known.
  """

  def __init__(self, patterns: tuple[str, ...] = ()) -> None:
    self.patterns = patterns
    self.exact: set[str] = set()
    self.has_unseen = False
    self._matched: set[str] = set()
    self._names: dict[str, None] = {}

  def holds(self, place: _jaxprs.Place) -> bool:
    """Whether what stands at this place is to stay in float32."""
    names = dict.fromkeys(place.names.all())
    self._names.update(names)
    found = {p for p in self.patterns if self._fits(p, names)}
    self._matched |= found
    return bool(found)

  def learn(self) -> bool:
    """Whether a pattern has held what it does not name, as is known now.

    A key may have what is special in a pattern, and a name is no pattern.
    """
    new = set(self.patterns) & self._names.keys() - self.exact
    self.exact |= new
    others = self._names.keys() - new
    return any(fnmatch.fnmatchcase(x, p) for p in new for x in others)

  def check(self) -> str:
    """What to tell if a pattern selects nothing; empty if all select.

    Raises:
      ValueError: with the same, if it is certain.
    """
    unmatched = [p for p in self.patterns if p not in self._matched]
    if not unmatched:
      return ""
    names = list(self._names)
    nearest = difflib.get_close_matches(unmatched[0], names, _NEAREST, 0.0)
    hint = f"The nearest names are {', '.join(map(repr, nearest))}."
    message = (
      "keep_float32 must name products of the function by their scope, the"
      " path of their weights, or a line, as optax_lossscale.diagnostics"
      f".precision_report prints them, got {unmatched[0]!r}, which selects"
      " none."
      f" {hint if nearest else 'There are no products.'}"
    )
    if self.has_unseen:
      return (
        f"{message} Some products are in rules that could not be looked at."
      )
    raise ValueError(message)

  def _fits(self, pattern: str, names: Iterable[str]) -> bool:
    if pattern in names or pattern in self.exact:
      return pattern in names
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def as_patterns(patterns: Any) -> tuple[str, ...]:
  """The patterns, checked."""
  many: Any = (patterns,) if isinstance(patterns, str) else patterns
  many = tuple(many) if isinstance(many, Iterable) else (many,)
  if not all(isinstance(pattern, str) for pattern in many):
    raise TypeError(
      "keep_float32 must be a name or several, such as 'Net/block1', got"
      f" keep_float32 = {patterns!r}."
    )
  return many
