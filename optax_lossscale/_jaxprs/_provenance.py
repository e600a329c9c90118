"""Provenance of equations: name scopes, parameter paths and source lines.

Reports identify a matmul by a label of these names, and ``keep_float32=`` of
``autocast`` selects it by them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import itertools
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _source_info

# The scope of the equations of the optimizer that `with_loss_scaling` wraps.
OPTIMIZER_SCOPE = "with_loss_scaling"

# Scopes that JAX and this package add to the scopes of the user.
_HIDDEN_SCOPES = {"", "checkpoint", "rematted_computation", OPTIMIZER_SCOPE}

_AUTOCAST_PREFIX = "autocast-"
# "no weights at model.py:32" selects the matmuls of a line that have no
# parameter path, if other matmuls of the line have one.
NO_WEIGHTS = "no weights"


class _AutocastScope(str):
  """The scope of an equation that `autocast` made, with its dtype.

  The scope stays with an equation through all later transformations. It has a
  separate class, so that a user's scope of the same name is not mistaken for
  it. The dtype is in the text, because JAX compares scopes as strings.
  """

  __slots__ = ()


class _ParamPathScope(str):
  """A name scope with a parameter path.

  A path may be split: the call of a jaxpr has the part that all its matmuls
  share, and each matmul within the jaxpr has the remaining part.
  """

  __slots__ = ()


class EqnNames(NamedTuple):
  """The names of an equation, as reports print them.

  Attributes:
    name_scope: its name scopes, such as ``Net/block1``; often empty.
    param_path: the path of its weights, such as ``blocks/2/up``; often empty.
    scoped_path: name scopes and parameter paths, merged in the order of the
      name stack.
    lines: the user's source lines of its traceback, the innermost first.
  """

  name_scope: str = ""
  param_path: str = ""
  scoped_path: str = ""
  lines: tuple[_source_info.SourceLine, ...] = ()

  def prefixes(self) -> dict[str, None]:
    """Return all names without lines: of the equation and its outer scopes.

    The result is a dict without values, since the order matters.
    """
    split_names = [full_name.split("/") for full_name in self[:3] if full_name]
    return {
      "/".join(full_name[:n]): None
      for full_name in split_names
      for n in range(len(full_name), 0, -1)
      if any(full_name[:n])  # A key may be empty.
    }

  def line_prefixes(self) -> list[str]:
    """Return the names that may precede a line to select the equation."""
    no_weights = [] if self.param_path else [NO_WEIGHTS]
    return ["", *self.prefixes(), *no_weights]

  def selectors(self) -> Iterator[str]:
    """Yield all names that select the equation: prefixes, lines and pairs."""
    yield from self.prefixes()
    line_selectors = [x for line in self.lines for x in line.selectors]
    pairs = itertools.product(self.line_prefixes(), line_selectors)
    yield from itertools.starmap(format_location, pairs)

  def candidate_labels(self) -> list[str]:
    """Return the names without lines that a label may consist of.

    The first one is preferred: the name scope if it already contains the layer,
    as with libraries that open a scope for each module; otherwise the parameter
    path. The last one is the longest.
    """
    # The last key of a path names an array of the layer, unless it is a number:
    # the index of the layer. Parameters in a plain list have no other keys, so
    # only the scopes name their layers.
    *layer, key = self.param_path.split("/")
    layer_name = key if key.isdigit() else ["", *layer][-1]
    is_list_item = key == self.param_path and key.isdigit()
    scope_has_layer = is_list_item or layer_name in self.name_scope.split("/")
    candidates = [
      self.name_scope if scope_has_layer else "",
      self.param_path,
      self.scoped_path,
    ]
    return list(filter(None, candidates)) or [""]


class EqnLocation(NamedTuple):
  """The location of an equation in a program of nested jaxprs.

  The default is the outermost jaxpr. A traversal extends the location by each
  equation that it enters.

  Attributes:
    name_stack: JAX's entries of the name stacks of the equation and of the
      enclosing ones: scopes, and the transformations between them.
    lines: the known source lines of the user's calls that led to the equation,
      the innermost first, up to the function that ``autocast`` wraps.
  """

  name_stack: tuple[Any, ...] = ()
  lines: tuple[_source_info.SourceLine, ...] = ()

  @property
  def names(self) -> EqnNames:
    """The names of the equation.

    They are equal for a matmul and its derivatives, with and without ``vmap``.
    """
    path_parts: list[str] = []
    for name in self._filter_scopes(_ParamPathScope):
      # The name stack of a backward pass may repeat the enclosing scopes. These
      # are the same objects, where equal names of nested layers are not.
      repeats = [i for i, x in enumerate(path_parts) if x is name]
      path_parts = [*path_parts[: repeats[0] if repeats else None], name]
    name_scope = _join_scopes(self.name_stack, _AutocastScope, _ParamPathScope)
    scoped_path = _join_scopes(self.name_stack, _AutocastScope)
    return EqnNames(name_scope, "/".join(path_parts), scoped_path, self.lines)

  @property
  def source_line(self) -> str:
    """The innermost line of the user as a string; empty if none is known."""
    return str(self.lines[0]) if self.lines else ""

  @property
  def label(self) -> str:
    """A label of the equation that always includes its source line."""
    return format_location(self.names.candidate_labels()[0], self.source_line)

  @property
  def autocast_dtype(self) -> Any:
    """The half precision of `autocast`; None outside of `autocast`."""
    scopes = self._filter_scopes(_AutocastScope)
    name = scopes[-1].removeprefix(_AUTOCAST_PREFIX) if scopes else None
    return name and jnp.dtype(name)

  @property
  def is_backward(self) -> bool:
    """Whether the equation is part of the backward pass of the loss.

    The backward pass of a derivative inside of the loss, such as a force, is
    part of the forward pass: if it overflows, so does the loss, whatever the
    loss scale is.
    """
    return self._list_derivatives()[:1] == ["transpose"]

  @property
  def is_in_optimizer(self) -> bool:
    """Whether the equation is part of an optimizer with loss scaling."""
    return any(x.name == OPTIMIZER_SCOPE for x in self.name_stack)

  @property
  def is_differentiated(self) -> bool:
    """Whether the equation is part of a function that is differentiated."""
    return bool(self._list_derivatives())

  def push_scope(self, eqn: core.JaxprEqn) -> "EqnLocation":
    """Return the location of an equation, without its lines.

    This is cheaper than :meth:`locate`, which reads a traceback.
    """
    return self._replace(name_stack=self.name_stack + _get_name_stack(eqn))

  def locate(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "EqnLocation":
    """Return the location of an equation of a jaxpr at this location."""
    eqn_lines, is_complete = _source_info.get_user_lines(eqn, jaxpr)
    # A complete traceback includes the lines of the enclosing equations.
    outer_lines = () if eqn_lines and is_complete else self.lines
    return self.push_scope(eqn)._replace(lines=eqn_lines + outer_lines)

  def _list_derivatives(self) -> list[str]:
    """Return the derivatives around the equation, the outermost first."""
    # JAX records only these names of derivatives.
    transforms = [x.name for x in self.name_stack if _is_transform(x)]
    return [x for x in transforms if x in ("jvp", "transpose")]

  def _filter_scopes(self, cls: type[str]) -> list[str]:
    """Return the scopes of a class, the outermost first."""
    return [x.name for x in self.name_stack if isinstance(x.name, cls)]


ROOT_LOCATION = EqnLocation()


def _join_scopes(stack: Sequence[Any], *excluded_types: type[str]) -> str:
  """Join the scopes of a name stack, except scopes of the excluded types."""
  groups: list[list[str]] = [[]]  # Each transformation begins a group.
  for entry in stack:
    if _is_transform(entry):
      groups.append([])
    else:
      groups[-1].append(entry.name)
  joined_parts: list[str] = []
  # The scopes that follow a transformation may repeat those before it.
  for scopes in groups:
    group_parts = [
      name
      for scope in scopes
      if not isinstance(scope, excluded_types)
      for name in scope.split("/")
      # The keys of parameters may be any strings, including these.
      if name not in _HIDDEN_SCOPES or isinstance(scope, _ParamPathScope)
    ]
    joined_parts = (
      group_parts
      if group_parts[: len(joined_parts)] == joined_parts
      else joined_parts + group_parts
    )
  return "/".join(joined_parts)


def has_scope(eqn: core.JaxprEqn, name: str) -> bool:
  """Return whether the name stack of an equation has a user's scope.

  The enclosing equations are not considered.
  """
  user_scopes = [x.name for x in _get_name_stack(eqn) if type(x.name) is str]
  return any(name in scope.split("/") for scope in user_scopes)


def tag_param_path(eqn: core.JaxprEqn, path: Sequence[str]) -> core.JaxprEqn:
  """Append a parameter path to the name stack of an equation."""
  return (
    _extend_name_stack(eqn, _ParamPathScope("/".join(path))) if path else eqn
  )


def tag_autocast(eqn: core.JaxprEqn, dtype: Any) -> core.JaxprEqn:
  """Return the equation, tagged as made by `autocast` for this dtype."""
  name = f"{_AUTOCAST_PREFIX}{jnp.dtype(dtype).name}"
  return _extend_name_stack(eqn, _AutocastScope(name))


def _extend_name_stack(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
  """Append a scope, whose class is kept, to the name stack of an equation."""
  source_info: Any = eqn.source_info
  if not hasattr(source_info.name_stack, "extend"):
    return eqn  # This JAX stores scopes differently.
  name_stack = source_info.name_stack.extend(name)
  return eqn.replace(source_info=source_info.replace(name_stack=name_stack))


def _get_name_stack(eqn: core.JaxprEqn) -> tuple[Any, ...]:
  """Return the entries of the name stack, the outermost first."""
  return getattr(eqn.source_info.name_stack, "stack", ())


def _is_transform(scope: Any) -> bool:
  """Return whether an entry is a ``jvp``, ``transpose`` or ``vmap``."""
  return type(scope).__name__ == "Transform"


def format_location(scope: str, source_line: str) -> str:
  """Format a location for reports: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source_line]))


def make_unique_labels(
  sites: Sequence[tuple[EqnNames, bool]],
) -> list[tuple[str, str]]:
  """Return the shortest unique label of each matmul or convolution.

  The candidates, in this order, are the names of
  :meth:`EqnNames.candidate_labels`, and each of them with a source line. The
  line is the innermost one that no other matmul with this name has (or, for a
  matmul without weights, no other matmul without weights). If there is none,
  the label has the innermost line, and may be ambiguous. A matmul and its
  derivatives have the same label.

  Args:
    sites: for each equation its names, and whether it is in a backward pass.

  Returns:
    For each equation its label, and the source line that distinguishes it from
    others with the same name, as a string; empty if no line is known.
  """
  distinct_names = dict.fromkeys(names for names, _ in sites)
  forward_names = {names for names, is_backward in sites if not is_backward}
  names_by_prefix = _group_names(distinct_names, EqnNames.prefixes)
  names_by_pair = _group_names(
    distinct_names,
    lambda names: itertools.product(names.line_prefixes(), names.lines),
  )

  def is_unique(prefix: str) -> bool:
    # If a prefix occurs in the forward pass, only the matmuls of the forward
    # pass decide, since the backward pass has their derivatives.
    group = names_by_prefix.get(prefix, [])
    group = [x for x in group if x in forward_names] or group
    return bool(group) and all(_is_same_site(group[0], x) for x in group)

  def make_label(names: EqnNames) -> tuple[str, str]:
    """Return the label and the line of an equation with these names."""
    candidates = names.candidate_labels()
    unique_candidates = list(filter(is_unique, candidates))
    no_weights = [] if names.param_path else [NO_WEIGHTS]
    prefixes = [*unique_candidates, *candidates, *no_weights]
    pairs = itertools.product(prefixes, names.lines)
    unique_pairs = (
      pair
      for pair in pairs
      if all(_is_same_site(names, x) for x in names_by_pair[pair])
    )
    nearest_pair = prefixes[0], [*names.lines, ""][0]
    prefix, line = next(unique_pairs, nearest_pair)
    label = [*unique_candidates, format_location(prefix, str(line))][0]
    return label, str(line)

  labels = {names: make_label(names) for names in distinct_names}
  return [labels[names] for names, _ in sites]


def _group_names(
  distinct_names: Iterable[EqnNames],
  get_keys: Callable[[EqnNames], Iterable[Any]],
) -> dict[Any, list[EqnNames]]:
  """Return for each key the names that have it."""
  groups: dict[Any, list[EqnNames]] = {}
  for names in distinct_names:
    for key in get_keys(names):
      groups.setdefault(key, []).append(names)
  return groups


def _is_same_site(a: EqnNames, b: EqnNames) -> bool:
  """Return whether two names may belong to one matmul and its derivatives."""
  # JAX drops lines from the tracebacks of some equations, so the shorter one
  # must be a subsequence. `in` advances the iterator, which compares the order.
  shorter, longer = sorted([a.lines, b.lines], key=len)
  longer_iter = iter(longer)
  return a[:3] == b[:3] and all(line in longer_iter for line in shorter)
