"""Matches the patterns of ``keep_float32`` against the names of matmuls."""

from collections.abc import Callable, Iterable
import difflib
import fnmatch
from typing import Any, NamedTuple

from optax_lossscale._jaxprs import _provenance

_NUM_SUGGESTIONS = 5
_NUM_SUGGESTED_PATHS = 3


class Match(NamedTuple):
  """The match of a filter with one matmul, or with several as a unit.

  The matmuls of a custom derivative are a unit: all of them stay in float32, or
  none.

  Attributes:
    names: the names of each matmul.
    patterns: the patterns that select at least one of the matmuls.
  """

  names: tuple[_provenance.EqnNames, ...]
  patterns: frozenset[str]

  @property
  def is_kept(self) -> bool:
    """Whether the matmuls stay in float32."""
    return bool(self.patterns)


class Float32Filter(NamedTuple):
  """Selects matmuls by the names that the reports print.

  Attributes:
    patterns: the patterns of the user, in the syntax of ``fnmatch``.
    literal_names: the patterns that are compared literally, because a matmul
      has exactly this name.
  """

  patterns: tuple[str, ...] = ()
  literal_names: frozenset[str] = frozenset()

  def match(self, *locations: _provenance.EqnLocation) -> Match:
    """Match the patterns against all names of some locations, as a unit."""
    names = tuple(location.names for location in locations)
    all_names = _collect_selectors(names)
    patterns = {p for p in self.patterns if self._matches(p, all_names)}
    return Match(names, frozenset(patterns))

  def with_literal_names(self, matches: Iterable[Match]) -> "Float32Filter":
    """Return a filter that compares the names of matmuls literally.

    The key of a parameter may contain ``*``, ``?`` or ``[``, such as
    ``"w[0]"``. As a pattern of ``fnmatch``, such a name would not match itself,
    or would match other names as well.
    """
    names = _collect_selectors(x for match in matches for x in match.names)
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
    """Check that each pattern selects a matmul.

    Args:
      matches: all matches in the function.
      has_opaque_rules: whether there may be matmuls with unknown names in
        custom derivative rules.
      get_cast_names: returns the names of all matmuls in half precision,
        including those of an inner `autocast`. It is called only if a pattern
        selects nothing.

    Returns:
      The warning for a pattern that selects nothing, but may select a matmul in
      a rule; empty if there is no such pattern.

    Raises:
      ValueError: if a pattern certainly selects nothing.
    """
    matches = list(matches)
    matched_patterns = frozenset[str]().union(*(x.patterns for x in matches))
    unmatched_patterns = [p for p in self.patterns if p not in matched_patterns]
    if not unmatched_patterns:
      return ""
    # An error about the first pattern is enough, and easier to read.
    nearest = _find_nearest_names(
      unmatched_patterns[0], [x for match in matches for x in match.names]
    )
    # Matmuls of an inner autocast are half precision before this one runs, so
    # they have no match, but the user sees their names in the reports.
    name = repr(unmatched_patterns[0])
    if self._matches(
      unmatched_patterns[0], _collect_selectors(get_cast_names())
    ):
      message = (
        f"keep_float32 = {name} selects matmuls of an inner autocast, which has"
        " already chosen their dtype. Pass the name to the inner autocast:"
        f" autocast(part, keep_float32={name})."
      )
    elif nearest:
      message = (
        f"keep_float32 = {name} selects no matmul or convolution. Pass a name"
        " scope, a parameter path or a source line, as"
        " optax_lossscale.diagnostics.count_flops prints them. The nearest"
        f" names are {', '.join(map(repr, nearest))}."
      )
    else:
      message = (
        f"keep_float32 = {name} selects no matmul or convolution, because the"
        " function contains none. Remove keep_float32."
      )
    # The name may belong to a matmul in a rule, so this is not an error.
    if has_opaque_rules:
      return (
        f"{message} The name may be inside a custom derivative rule, which"
        " autocast can't inspect."
      )
    raise ValueError(message)

  def _matches(self, pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches one of the names."""
    # An exact match needs no `fnmatch`, in which brackets match differently.
    if pattern in names or pattern in self.literal_names:
      return pattern in names
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def as_patterns(patterns: Any) -> tuple[str, ...]:
  """Return the argument ``keep_float32`` as a tuple of strings, or raise."""
  pattern_tuple: Any = (patterns,) if isinstance(patterns, str) else patterns
  # A value that is neither a string nor iterable fails the check below.
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


def _find_nearest_names(
  pattern: str, eqn_names: list[_provenance.EqnNames]
) -> list[str]:
  """Return the names that resemble a pattern most, paths of weights first."""
  # With a cutoff of 0.0 there are suggestions even if no name is similar.
  paths = {x.param_path: None for x in eqn_names if x.param_path}
  nearest = difflib.get_close_matches(pattern, paths, _NUM_SUGGESTED_PATHS, 0.0)
  others = [x for x in _collect_selectors(eqn_names) if x not in nearest]
  num_others = _NUM_SUGGESTIONS - len(nearest)
  return nearest + difflib.get_close_matches(pattern, others, num_others, 0.0)


def _collect_selectors(
  eqn_names: Iterable[_provenance.EqnNames],
) -> dict[str, None]:
  """Return all names that select one of the matmuls, in program order."""
  return {name: None for names in eqn_names for name in names.selectors()}
