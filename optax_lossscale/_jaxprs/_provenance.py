"""Where an equation stands in a program, by names that a user knows."""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any, NamedTuple, TypeVar

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _source_info

# What JAX puts among the scopes of a user.
_JAX_SCOPES = {"", "checkpoint", "rematted_computation"}

_AUTOCAST_PREFIX = "autocast-"
# Before a line, it selects what is there without a path of weights, such as a
# product of weights that were updated, beside others on this line.
_NO_WEIGHTS = "no weights"


_Scope = TypeVar("_Scope", bound=str)


class MatmulDtypes(NamedTuple):
  """The dtypes in which `autocast` runs a matmul and its derivatives.

  Attributes:
    operand: dtype of both operands.
    result: dtype of the result, which later data movement keeps.
    tangent: dtype of the matmuls of a custom backward pass. The other
      derivatives follow from ``operand`` and ``result``, since JAX derives them
      from the forward pass.
  """

  operand: Any
  result: Any
  tangent: Any

  @classmethod
  def uniform(cls, dtype: Any) -> "MatmulDtypes":
    """Return the dtypes of a matmul that runs in one dtype only."""
    return cls(dtype, dtype, dtype)

  def for_data_movement(self) -> "MatmulDtypes":
    """Return the dtypes of an equation that moves the result of a matmul."""
    return self._replace(operand=self.result)

  def for_backward(self) -> "MatmulDtypes":
    """Return the dtypes of the matmuls of a custom backward pass."""
    return self.uniform(self.tangent)


class _DtypeScope(str):
  """The scope of an equation that `autocast` made, with its dtypes.

  The scope stays with an equation through all later transformations. It has a
  separate class, so that a user's scope of the same name is not mistaken for
  it. All dtypes are in the text, because JAX compares scopes as strings.
  """

  __slots__ = ()

  @classmethod
  def from_dtypes(cls, dtypes: MatmulDtypes) -> "_DtypeScope":
    """Return the scope, such as ``autocast-float16`` if all dtypes agree."""
    names = [jnp.dtype(dtype).name for dtype in dtypes]
    names = names if len(set(names)) > 1 else names[:1]
    return cls(_AUTOCAST_PREFIX + "-".join(names))

  def as_dtypes(self) -> MatmulDtypes:
    """Return the dtypes from which the scope was made."""
    names = self.removeprefix(_AUTOCAST_PREFIX).split("-")
    names = names if len(names) > 1 else names * len(MatmulDtypes._fields)
    return MatmulDtypes(*map(jnp.dtype, names))


class _ParamPathScope(str):
  """The scope that tells a path of weights, or the rest of it within a call."""

  __slots__ = ()


class EqnNames(NamedTuple):
  """The names of a place: scopes, weights and lines are three things.

  Attributes:
    name_scope: the scopes around it, such as ``Net/block1``; often empty.
    param_path: the path of its weights, such as ``blocks/2/up``; often empty.
    scoped_path: scopes and weights in one, in the order in which they stand.
    lines: the user's lines that led here, the nearest first.
  """

  name_scope: str = ""
  param_path: str = ""
  scoped_path: str = ""
  lines: tuple[_source_info.SourceLine, ...] = ()

  def prefixes(self) -> dict[str, None]:
    """The names without lines, of the place and of all that is around it."""
    split_names = [full_name.split("/") for full_name in self[:3] if full_name]
    return {
      "/".join(full_name[:n]): None
      for full_name in split_names
      for n in range(len(full_name), 0, -1)
      if any(full_name[:n])  # A key may be empty.
    }

  def selectors(self) -> Iterator[str]:
    """All names that select it: each alone, and with a line."""
    prefixes, line_selectors = (
      self.prefixes(),
      [x for y in self.lines for x in y.selectors],
    )
    yield from prefixes
    yield from line_selectors
    line_prefixes = [*prefixes] if self.param_path else [*prefixes, _NO_WEIGHTS]
    for pair in itertools.product(line_prefixes, line_selectors):
      yield format_location(*pair)

  def candidate_labels(self) -> list[str]:
    """The names without lines that tell most, the shortest first.

    The path of the weights tells which layer it is, unless the scopes are those
    of a library that has the whole path. They end in the name of the layer, in
    which the last key is that of an array, if it is no number. And some have a
    plain list of weights beside them.
    """
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
  """Where a walk through jaxprs has come to.

  Attributes:
    name_stack: the scopes around it, as JAX keeps them: beside their names it
      notes the transformations between them.
    lines: the user's lines that led here, as far as they are known, the nearest
      first, up to the function that was given to `autocast`.
    eqn_path: the names of the steps that led here.
  """

  name_stack: tuple[Any, ...] = ()
  lines: tuple[_source_info.SourceLine, ...] = ()
  eqn_path: tuple[str, ...] = ()

  @property
  def names(self) -> EqnNames:
    """Its names, the same forward and backward, with and without ``vmap``."""
    path_parts: list[str] = []
    for name in self._filter_scopes(_ParamPathScope):
      # The backward pass may tell again what is around it: the same object.
      repeats = [i for i, x in enumerate(path_parts) if x is name]
      path_parts = [*path_parts[: repeats[0] if repeats else None], name]
    name_scope = _join_scopes(self.name_stack, _DtypeScope, _ParamPathScope)
    scoped_path = _join_scopes(self.name_stack, _DtypeScope)
    return EqnNames(name_scope, "/".join(path_parts), scoped_path, self.lines)

  @property
  def name_scope(self) -> str:
    """The scopes around it, such as ``Net/block1``; often empty."""
    return self.names.name_scope

  @property
  def param_path(self) -> str:
    """The path of its weights, such as ``blocks/2/up``; often empty."""
    return self.names.param_path

  @property
  def line(self) -> _source_info.SourceLine | None:
    """The user's line that is nearest, if one is known."""
    return self.lines[0] if self.lines else None

  @property
  def source_line(self) -> str:
    """The same as a string; empty if none is known."""
    return str(self.line or "")

  @property
  def label(self) -> str:
    """How a report names it that tells its line in any case."""
    return format_location(self.names.candidate_labels()[0], self.source_line)

  @property
  def matmul_dtypes(self) -> MatmulDtypes | None:
    """The dtypes that `autocast` chose; None outside of `autocast`."""
    dtype_scopes = self._filter_scopes(_DtypeScope)
    return dtype_scopes[-1].as_dtypes() if dtype_scopes else None

  @property
  def autocast_dtype(self) -> Any:
    """The dtype of the operands in `autocast`; None outside of `autocast`."""
    dtypes = self.matmul_dtypes
    return dtypes.operand if dtypes else None

  @property
  def is_backward(self) -> bool:
    """Whether it is part of a backward pass.

    The backward pass of a derivative inside of the loss, such as a force, is
    part of the forward pass of the loss: if it overflows, so does the loss, and
    no loss scale helps.
    """
    # This is all that JAX leaves of derivatives, the outermost first.
    names = (x.name for x in self.name_stack if _is_transform(x))
    derivatives = (name for name in names if name in ("jvp", "transpose"))
    return next(derivatives, "") == "transpose"

  def push_scope(self, eqn: core.JaxprEqn) -> "EqnLocation":
    """The place of an equation but for its lines, which take longer to find."""
    return self._replace(name_stack=self.name_stack + _get_name_stack(eqn))

  def locate(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "EqnLocation":
    """The place of an equation in the jaxpr that the walk has come to."""
    eqn_lines, is_complete = _source_info.get_user_lines(eqn, jaxpr)
    outer_lines = () if eqn_lines and is_complete else self.lines
    return self.push_scope(eqn)._replace(lines=eqn_lines + outer_lines)

  def push_eqn_path(self, name: str) -> "EqnLocation":
    """One step further."""
    return self._replace(eqn_path=(*self.eqn_path, name))

  def _filter_scopes(self, cls: type[_Scope]) -> list[_Scope]:
    return [x.name for x in self.name_stack if isinstance(x.name, cls)]


def _join_scopes(stack: Sequence[Any], *excluded_types: type[str]) -> str:
  """The scopes as one, but for some."""
  joined_parts: list[str] = []
  # What follows a transformation may tell again what is around it.
  for _, group in itertools.groupby(stack, _TransformGrouper()):
    scopes = [x.name for x in group if not _is_transform(x)]
    group_parts = [
      name
      for scope in scopes
      if not isinstance(scope, excluded_types)
      for name in scope.split("/")
      # A key may be empty, or have such a name.
      if name not in _JAX_SCOPES or isinstance(scope, _ParamPathScope)
    ]
    joined_parts = (
      group_parts
      if group_parts[: len(joined_parts)] == joined_parts
      else joined_parts + group_parts
    )
  return "/".join(joined_parts)


class _TransformGrouper:
  """Numbers the groups of scopes, each with the transformations before it."""

  def __init__(self) -> None:
    self._group, self._was_transform = 0, False

  def __call__(self, scope: Any) -> int:
    is_transform = _is_transform(scope)
    self._group += is_transform and not self._was_transform
    self._was_transform = is_transform
    return self._group


def has_scope(eqn: core.JaxprEqn, name: str) -> bool:
  """Whether an equation stands in a scope of this name, within its jaxpr."""
  user_scopes = [x.name for x in _get_name_stack(eqn) if type(x.name) is str]
  return any(name in scope.split("/") for scope in user_scopes if name in scope)


def tag_param_path(eqn: core.JaxprEqn, path: Sequence[str]) -> core.JaxprEqn:
  """The equation, with a path of weights within all that it stands in."""
  return (
    _extend_name_stack(eqn, _ParamPathScope("/".join(path))) if path else eqn
  )


def tag_autocast(eqn: core.JaxprEqn, dtypes: MatmulDtypes) -> core.JaxprEqn:
  """Return the equation, tagged as made by `autocast` for these dtypes."""
  return _extend_name_stack(eqn, _DtypeScope.from_dtypes(dtypes))


def _extend_name_stack(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
  source_info: Any = eqn.source_info
  if not hasattr(source_info.name_stack, "extend"):
    return eqn  # Another JAX keeps scopes in another way.
  name_stack = source_info.name_stack.extend(name)
  return eqn.replace(
    source_info=type(source_info)(source_info.traceback, name_stack)
  )


def _get_name_stack(eqn: core.JaxprEqn) -> tuple[Any, ...]:
  return getattr(eqn.source_info.name_stack, "stack", ())


def _is_transform(scope: Any) -> bool:
  """Whether this is what JAX notes of ``jvp``, ``transpose`` or ``vmap``."""
  return type(scope).__name__ == "Transform"


def format_location(scope: str, source_line: str) -> str:
  """How reports name a place: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source_line]))


def make_unique_labels(
  sites: Sequence[tuple[EqnNames, bool]],
) -> list[tuple[str, str]]:
  """For each place, the shortest name that tells it from all others.

  It is the path of its weights, or else its scopes, and a line, if they do not
  tell: the nearest one that leads to no other, or to no other without weights.
  Where there is none, it is the nearest of all. A name is that of a product,
  with its derivatives.

  Args:
    sites: for each place, its names, and whether it is in a backward pass.

  Returns:
    For each of them its name; and the line that tells it from others which have
    the same name but for the line, as a string, empty if none is known.
  """
  names_by_prefix: dict[str, list[EqnNames]] = {}
  for is_backward in False, True:  # A backward pass is that of a forward pass.
    pass_names_by_prefix: dict[str, list[EqnNames]] = {}
    for names in dict.fromkeys(
      x for x, backward in sites if backward == is_backward
    ):
      for prefix in names.prefixes():
        pass_names_by_prefix.setdefault(prefix, []).append(names)
    names_by_prefix = pass_names_by_prefix | names_by_prefix
  distinct_names = dict.fromkeys(names for names, _ in sites)
  names_by_line: dict[_source_info.SourceLine, list[EqnNames]] = {}
  for names in distinct_names:
    for line in names.lines:
      names_by_line.setdefault(line, []).append(names)
  prefixes_by_names = {names: names.prefixes() for names in distinct_names}

  def match_names(prefix: str, line: _source_info.SourceLine) -> list[EqnNames]:
    if prefix == _NO_WEIGHTS:
      return [x for x in names_by_line[line] if not x.param_path]
    return [
      x
      for x in names_by_line[line]
      if not prefix or prefix in prefixes_by_names[x]
    ]

  def make_label(names: EqnNames) -> tuple[str, str]:
    candidates = names.candidate_labels()
    unique_candidates = [
      x for x in candidates if _is_single_site(names_by_prefix.get(x, []))
    ]
    fallbacks = [] if names.param_path else [_NO_WEIGHTS]
    prefixes = [*unique_candidates, *candidates, *fallbacks]
    pairs = list(itertools.product(prefixes, names.lines))
    unique_pairs = (
      (prefix, str(line))
      for prefix, line in pairs
      if all(_is_same_site(names, other) for other in match_names(prefix, line))
    )
    nearest_line = str([*names.lines, ""][0])
    prefix, source_line = next(
      unique_pairs, ([*unique_candidates, *candidates][0], nearest_line)
    )
    return unique_candidates[0] if unique_candidates else format_location(
      prefix, source_line
    ), source_line

  labels = {names: make_label(names) for names in distinct_names}
  return [labels[names] for names, _ in sites]


def _is_single_site(names: list[EqnNames]) -> bool:
  """Whether these are one product."""
  return bool(names) and all(_is_same_site(names[0], x) for x in names)


def _is_same_site(a: EqnNames, b: EqnNames) -> bool:
  """Whether two names are those of one product, as far as they tell."""
  return a[:3] == b[:3] and _is_subsequence(a.lines, b.lines)


def _is_subsequence(
  a: tuple[_source_info.SourceLine, ...], b: tuple[_source_info.SourceLine, ...]
) -> bool:
  """Whether two ways are one: JAX forgets lines of some equations."""
  shorter, longer = sorted([a, b], key=len)
  longer_iter = iter(longer)
  return all(line in longer_iter for line in shorter)
