"""Which products stay in float32 because the user named them."""

from collections.abc import Callable, Iterable
import difflib
import fnmatch
from typing import Any, NamedTuple

from optax_lossscale._jaxprs import _provenance

_NUM_SUGGESTIONS = 5


class Match(NamedTuple):
  """What was decided of a product, or of several that stay or go together.

  Attributes:
    names: the names of each.
    patterns: those of the user's patterns that select one of them.
  """

  names: tuple[_provenance.EqnNames, ...]
  patterns: frozenset[str]

  @property
  def is_kept(self) -> bool:
    """Whether they stay in float32."""
    return bool(self.patterns)


class Float32Filter(NamedTuple):
  """The products that patterns select, by the names that reports print.

  Attributes:
    patterns: the patterns, as in ``fnmatch``.
    literal_names: those that are names, and so are no patterns.
  """

  patterns: tuple[str, ...] = ()
  literal_names: frozenset[str] = frozenset()

  def match(self, *locations: _provenance.EqnLocation) -> Match:
    """What is decided of what stands at these places."""
    names = tuple(location.names for location in locations)
    all_names = _collect_names(names)
    patterns = {p for p in self.patterns if self._matches(p, all_names)}
    return Match(names, frozenset(patterns))

  def with_literal_names(self, matches: Iterable[Match]) -> "Float32Filter":
    """The same, which takes no pattern for one that is a name.

    A key may have what is special in a pattern.
    """
    names = _collect_names(x for match in matches for x in match.names)
    literal_names = {
      p for p in self.patterns if p in names and set(p) & set("*?[")
    }
    return self._replace(literal_names=frozenset(literal_names))

  def check_matches(
    self,
    matches: Iterable[Match],
    has_opaque_rules: bool,
    get_cast_names: Callable[[], list[_provenance.EqnNames]],
  ) -> str:
    """What to tell if a pattern selects nothing; empty if all select.

    Args:
      matches: all that were made.
      has_opaque_rules: whether there are products whose names cannot be known.
      get_cast_names: the names of all products that run in half, whichever
        `autocast` made them so. They are asked for only if they are needed.

    Raises:
      ValueError: with the same, if it is certain.
    """
    matches = list(matches)
    matched_patterns = frozenset[str]().union(*(x.patterns for x in matches))
    unmatched_patterns = [p for p in self.patterns if p not in matched_patterns]
    if not unmatched_patterns:
      return ""
    names = _collect_names(x for match in matches for x in match.names)
    nearest = difflib.get_close_matches(
      unmatched_patterns[0], names, _NUM_SUGGESTIONS, 0.0
    )
    name = repr(unmatched_patterns[0])
    if self._matches(unmatched_patterns[0], _collect_names(get_cast_names())):
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
    if has_opaque_rules:
      return (
        f"{message} The name may be inside a custom derivative rule, which"
        " autocast can't inspect."
      )
    raise ValueError(message)

  def _matches(self, pattern: str, names: Iterable[str]) -> bool:
    if pattern in names or pattern in self.literal_names:
      return pattern in names
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def as_patterns(patterns: Any) -> tuple[str, ...]:
  """The patterns, checked."""
  pattern_tuple: Any = (patterns,) if isinstance(patterns, str) else patterns
  pattern_tuple = (
    tuple(pattern_tuple)
    if isinstance(pattern_tuple, Iterable)
    else (pattern_tuple,)
  )
  if not all(isinstance(pattern, str) for pattern in pattern_tuple):
    raise TypeError(
      "keep_float32 must be a name or a list of names, such as 'Net/block1',"
      f" got keep_float32 = {patterns!r}."
    )
  return pattern_tuple


def _collect_names(
  eqn_names: Iterable[_provenance.EqnNames],
) -> dict[str, None]:
  """All names that select one of these, in the order of the program."""
  return {name: None for names in eqn_names for name in names.selectors()}
