"""Which products stay in float32 because the user named them."""

from collections.abc import Iterable, Iterator
import difflib
import fnmatch
from typing import Any

from optax_lossscale import _jaxprs

_NEAREST = 5


class Kept:
  """The products that patterns select, by the names that reports print.

  Attributes:
    patterns: the patterns, as in ``fnmatch``.
    has_unseen: whether there are products whose names cannot be known.
  """

  def __init__(self, patterns: tuple[str, ...] = ()) -> None:
    self.patterns = patterns
    self.has_unseen = False
    self._matched: set[str] = set()
    self._names: dict[str, None] = {}

  def holds(self, place: _jaxprs.Place) -> bool:
    """Whether what stands at this place is to stay in float32."""
    names = list(_names_of(place))
    self._names.update(dict.fromkeys(names))
    found = {p for p in self.patterns if any(_fits(n, p) for n in names)}
    self._matched |= found
    return bool(found)

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


def _names_of(place: _jaxprs.Place) -> Iterator[str]:
  """All names of a place: its scopes, its lines, and pairs of both."""
  names = place.scope.split("/") if place.scope else []
  scopes = ["/".join(names[:n]) for n in range(len(names), 0, -1)]
  lines = [name for line in place.lines for name in _names_of_line(line)]
  yield from scopes
  yield from lines
  for scope in scopes:
    for source in lines:
      yield _jaxprs.place_name(scope, source)


def _names_of_line(line: _jaxprs.Line) -> list[str]:
  file_name = line.short_name
  in_file = f"{file_name} ({line.function})", f"{file_name}:{line.number}"
  return [str(line), *in_file, file_name]


def _fits(name: str, pattern: str) -> bool:
  # A name may hold brackets, which mean something else in a pattern.
  return name == pattern or fnmatch.fnmatchcase(name, pattern)
