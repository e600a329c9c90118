"""Where an equation stands in a program, by names that a user knows."""

from collections.abc import Sequence
import itertools
import re
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs._lines import Line, lines_of

# What JAX puts around the name of a scope that it transforms, and what it names
# the part of a checkpoint that runs again. Neither is of the user.
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap)\(")
_BEGINS_AGAIN = re.compile(rf"/(?={_TRANSFORM.pattern})")
_OF_JAX = {"", "checkpoint", "rematted_computation"}

_MARK = "autocast-"
_MARKS = {f"{_MARK}{dtype}" for dtype in ("float16", "bfloat16")}


class _Mark(str):
  """The scope of what `autocast` makes, which tells its dtype.

  It stays with an equation through whatever transforms it later. It has a class
  of its own, so that a scope of the user which has its name is none.
  """

  __slots__ = ()


class Place(NamedTuple):
  """Where a walk through jaxprs has come to.

  Attributes:
    stack: the names of the scopes around it, as JAX writes them.
    lines: the user's lines that led here, as far as they are known, the nearest
      first, up to the function that was given to `autocast`.
    path: the names of the steps that led here.
    mark: the half precision in which `autocast` runs it, if it does.
  """

  stack: str = ""
  lines: tuple[Line, ...] = ()
  path: tuple[str, ...] = ()
  mark: Any = None

  @property
  def scope(self) -> str:
    """The scopes around it, such as ``Net/block1``; often empty.

    It is the same forward and backward, and with and without ``vmap``.
    """
    scope = ""
    for part in _BEGINS_AGAIN.split(self.stack):
      names = _untransformed(part).split("/")
      own = "/".join(n for n in names if n not in _OF_JAX | _MARKS)
      # The backward pass of a checkpoint tells twice what is around it.
      if not scope or f"{own}/".startswith(f"{scope}/"):
        scope = own
      elif own:
        scope = f"{scope}/{own}"
    return scope

  @property
  def line(self) -> Line | None:
    """The user's line that is nearest, if one is known."""
    return self.lines[0] if self.lines else None

  @property
  def source(self) -> str:
    """The same as a string; empty if none is known."""
    return str(self.line or "")

  @property
  def backward(self) -> bool:
    """Whether it is part of a backward pass."""
    # The name of a scope alone is all that JAX leaves of a transposition.
    return "transpose(" in self.stack

  def within(self, eqn: core.JaxprEqn) -> "Place":
    """The place of an equation but for its lines, which take longer to find."""
    names = self.stack, str(eqn.source_info.name_stack)
    mark = _mark_of(eqn) or self.mark
    return self._replace(stack="/".join(filter(None, names)), mark=mark)

  def at(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Place":
    """The place of an equation in the jaxpr that the walk has come to."""
    own, is_all = lines_of(eqn, jaxpr)
    outer = () if own and is_all else self.lines
    return self.within(eqn)._replace(lines=own + outer)

  def step(self, name: str) -> "Place":
    """One step further."""
    return self._replace(path=(*self.path, name))


def place_name(scope: str, source: str) -> str:
  """How reports name a place: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source]))


def telling_lines(
  places: Sequence[tuple[str, tuple[Line, ...]]],
) -> list[str]:
  """For each place, the line that tells it from others in the same scope.

  It is the nearest one that leads to no place with other lines; the nearest of
  all, if there is no such.

  Args:
    places: for each place, its scope and its lines.

  Returns:
    For each of them a line, as a string; empty if none is known.
  """
  led_to: dict[Any, set[tuple[Line, ...]]] = {}
  for scope, lines in places:
    for line in lines:
      led_to.setdefault((scope, line), set()).add(lines)
  told = []
  for scope, lines in places:
    others = [led_to[scope, line] for line in lines]
    are_same = [all(_may_be(lines, x) for x in many) for many in others]
    own = itertools.compress(lines, are_same)
    told.append(str([*own, *lines, ""][0]))
  return told


def _may_be(some: tuple[Line, ...], other: tuple[Line, ...]) -> bool:
  """Whether two ways are one: JAX forgets lines of some equations."""
  few, many = sorted([some, other], key=len)
  rest = iter(many)
  return all(line in rest for line in few)


def scopes_of(eqn: core.JaxprEqn) -> set[str]:
  """The names of the scopes around an equation, within its jaxpr."""
  return set(Place().within(eqn).scope.split("/")) - {""}


def with_scope(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
  """The equation in one more scope, within all that it stands in."""
  info: Any = eqn.source_info
  if not name or not hasattr(info.name_stack, "extend"):
    return eqn  # Another JAX keeps scopes in another way.
  stack = info.name_stack.extend(name)
  return eqn.replace(source_info=type(info)(info.traceback, stack))


def marked(eqn: core.JaxprEqn, dtype: Any) -> core.JaxprEqn:
  """The equation, marked as one that `autocast` made for this dtype."""
  return with_scope(eqn, _Mark(f"{_MARK}{dtype}"))


def _mark_of(eqn: core.JaxprEqn) -> Any:
  scopes = getattr(eqn.source_info.name_stack, "stack", ())
  names = [getattr(scope, "name", None) for scope in scopes]
  marks = [name for name in names if isinstance(name, _Mark)]
  return jnp.dtype(marks[-1].removeprefix(_MARK)) if marks else None


def _untransformed(part: str) -> str:
  """The names without what JAX puts around them."""
  while found := _TRANSFORM.match(part):
    end = _closing(part, found.end())
    part = part[found.end() : end] + part[end + 1 :]
  return part


def _closing(text: str, start: int) -> int:
  """Where the bracket closes that opened before; the end if it never does."""
  depth = 1
  for i, character in enumerate(text[start:], start):
    depth += {"(": 1, ")": -1}.get(character, 0)
    if not depth:
      return i
  return len(text)
