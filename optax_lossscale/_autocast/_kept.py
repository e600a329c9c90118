"""Which products stay in float32 because the user named them."""

from collections.abc import Callable, Iterable
import difflib
import fnmatch
from typing import Any, NamedTuple

from optax_lossscale._jaxprs import _places

_NEAREST = 5


class Decision(NamedTuple):
  """What was decided of a product, or of several that stay or go together.

  Attributes:
    names: the names of each.
    patterns: those of the user's patterns that select one of them.
  """

  names: tuple[_places.EqnNames, ...]
  patterns: frozenset[str]

  @property
  def is_kept(self) -> bool:
    """Whether they stay in float32."""
    return bool(self.patterns)


class Kept(NamedTuple):
  """The products that patterns select, by the names that reports print.

  Attributes:
    patterns: the patterns, as in ``fnmatch``.
    exact: those that are names, and so are no patterns.
  """

  patterns: tuple[str, ...] = ()
  exact: frozenset[str] = frozenset()

  def decide(self, *places: _places.EqnLocation) -> Decision:
    """What is decided of what stands at these places."""
    names = tuple(place.names for place in places)
    every = _all_names(names)
    patterns = {p for p in self.patterns if self._fits(p, every)}
    return Decision(names, frozenset(patterns))

  def with_exact(self, decisions: Iterable[Decision]) -> "Kept":
    """The same, which takes no pattern for one that is a name.

    A key may have what is special in a pattern.
    """
    names = _all_names(x for decision in decisions for x in decision.names)
    exact = {p for p in self.patterns if p in names and set(p) & set("*?[")}
    return self._replace(exact=frozenset(exact))

  def check(
    self,
    decisions: Iterable[Decision],
    has_unseen: bool,
    cast: Callable[[], list[_places.EqnNames]],
  ) -> str:
    """What to tell if a pattern selects nothing; empty if all select.

    Args:
      decisions: all that were made.
      has_unseen: whether there are products whose names cannot be known.
      cast: the names of all products that run in half, whichever `autocast`
        made them so. They are asked for only if they are needed.

    Raises:
      ValueError: with the same, if it is certain.
    """
    decisions = list(decisions)
    matched = frozenset[str]().union(*(x.patterns for x in decisions))
    unmatched = [p for p in self.patterns if p not in matched]
    if not unmatched:
      return ""
    names = _all_names(x for decision in decisions for x in decision.names)
    nearest = difflib.get_close_matches(unmatched[0], names, _NEAREST, 0.0)
    name = repr(unmatched[0])
    if self._fits(unmatched[0], _all_names(cast())):
      message = (
        f"keep_float32 = {name} selects matmuls of an inner autocast, which has"
        " already chosen their dtype. Pass the name to the inner autocast:"
        f" autocast(part, keep_float32={name})."
      )
    elif nearest:
      message = (
        f"keep_float32 = {name} selects no matmul or convolution. Pass a name"
        " scope, a parameter path or a source line, as"
        " optax_lossscale.diagnostics.precision_report prints them. The nearest"
        f" names are {', '.join(map(repr, nearest))}."
      )
    else:
      message = (
        f"keep_float32 = {name} selects no matmul or convolution, because the"
        " function contains none. Remove keep_float32."
      )
    if has_unseen:
      return (
        f"{message} The name may be inside a custom derivative rule, which"
        " autocast can't inspect."
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
      "keep_float32 must be a name or a list of names, such as 'Net/block1',"
      f" got keep_float32 = {patterns!r}."
    )
  return many


def _all_names(places: Iterable[_places.EqnNames]) -> dict[str, None]:
  """All names that select one of these, in the order of the program."""
  return {name: None for names in places for name in names.selectors()}
