"""Where an equation stands in a program, by names that a user knows."""

from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs._lines import Line, lines_of
from optax_lossscale._jaxprs._names import Names, place_name

# What JAX puts among the scopes of a user.
_OF_JAX = {"", "checkpoint", "rematted_computation"}

_MARK = "autocast-"


class _Mark(str):
  """The scope of what `autocast` makes, which tells its dtype.

  It stays with an equation through whatever transforms it later. It has a class
  of its own, so that a scope of the user which has its name is none.
  """

  __slots__ = ()


class _Weights(str):
  """The scope that tells a path of weights, or the rest of it within a call."""

  __slots__ = ()


class Place(NamedTuple):
  """Where a walk through jaxprs has come to.

  Attributes:
    stack: the scopes around it, as JAX keeps them: beside their names it notes
      the transformations between them.
    lines: the user's lines that led here, as far as they are known, the nearest
      first, up to the function that was given to `autocast`.
    path: the names of the steps that led here.
  """

  stack: tuple[Any, ...] = ()
  lines: tuple[Line, ...] = ()
  path: tuple[str, ...] = ()

  @property
  def names(self) -> Names:
    """Its names, the same forward and backward, with and without ``vmap``."""
    weights: list[str] = []
    for name in self._of_class(_Weights):
      # The backward pass may tell again what is around it: the same object.
      again = [i for i, x in enumerate(weights) if x is name]
      weights = [*weights[: again[0] if again else None], name]
    scope = _joined(self.stack, _Mark, _Weights)
    both = _joined(self.stack, _Mark)
    return Names(scope, "/".join(weights), both, self.lines)

  @property
  def scope(self) -> str:
    """The scopes around it, such as ``Net/block1``; often empty."""
    return self.names.scope

  @property
  def weights(self) -> str:
    """The path of its weights, such as ``blocks/2/up``; often empty."""
    return self.names.weights

  @property
  def line(self) -> Line | None:
    """The user's line that is nearest, if one is known."""
    return self.lines[0] if self.lines else None

  @property
  def source(self) -> str:
    """The same as a string; empty if none is known."""
    return str(self.line or "")

  @property
  def name(self) -> str:
    """How a report names it that tells its line in any case."""
    return place_name(self.names.best()[0], self.source)

  @property
  def mark(self) -> Any:
    """The half precision in which `autocast` runs it; None if it does not."""
    marks = self._of_class(_Mark)
    return jnp.dtype(marks[-1].removeprefix(_MARK)) if marks else None

  @property
  def backward(self) -> bool:
    """Whether it is part of a backward pass."""
    # This is all that JAX leaves of a transposition.
    return any(_is_transform(x) and x.name == "transpose" for x in self.stack)

  def within(self, eqn: core.JaxprEqn) -> "Place":
    """The place of an equation but for its lines, which take longer to find."""
    return self._replace(stack=self.stack + _stack_of(eqn))

  def at(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Place":
    """The place of an equation in the jaxpr that the walk has come to."""
    own, is_all = lines_of(eqn, jaxpr)
    outer = () if own and is_all else self.lines
    return self.within(eqn)._replace(lines=own + outer)

  def step(self, name: str) -> "Place":
    """One step further."""
    return self._replace(path=(*self.path, name))

  def _of_class(self, kind: type[str]) -> list[str]:
    return [x.name for x in self.stack if isinstance(x.name, kind)]


def _joined(stack: Sequence[Any], *without: type[str]) -> str:
  """The scopes as one, but for some."""
  whole: list[str] = []
  # What follows a transformation may tell again what is around it.
  for _, group in itertools.groupby(stack, _Counter()):
    scopes = [x.name for x in group if not _is_transform(x)]
    own = [
      name
      for scope in scopes
      if not isinstance(scope, without)
      for name in scope.split("/")
      if name not in _OF_JAX
    ]
    whole = own if own[: len(whole)] == whole else whole + own
  return "/".join(whole)


class _Counter:
  """Numbers the groups of scopes, each with the transformations before it."""

  def __init__(self) -> None:
    self._count, self._before = 0, False

  def __call__(self, scope: Any) -> int:
    is_transform = _is_transform(scope)
    self._count += is_transform and not self._before
    self._before = is_transform
    return self._count


def has_scope(eqn: core.JaxprEqn, name: str) -> bool:
  """Whether an equation stands in a scope of this name, within its jaxpr."""
  of_user = [x.name for x in _stack_of(eqn) if type(x.name) is str]
  return any(name in scope.split("/") for scope in of_user if name in scope)


def with_weights(eqn: core.JaxprEqn, path: Sequence[str]) -> core.JaxprEqn:
  """The equation, with a path of weights within all that it stands in."""
  return _with_scope(eqn, _Weights("/".join(path))) if path else eqn


def marked(eqn: core.JaxprEqn, dtype: Any) -> core.JaxprEqn:
  """The equation, marked as one that `autocast` made for this dtype."""
  return _with_scope(eqn, _Mark(f"{_MARK}{dtype}"))


def _with_scope(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn:
  info: Any = eqn.source_info
  if not hasattr(info.name_stack, "extend"):
    return eqn  # Another JAX keeps scopes in another way.
  stack = info.name_stack.extend(name)
  return eqn.replace(source_info=type(info)(info.traceback, stack))


def _stack_of(eqn: core.JaxprEqn) -> tuple[Any, ...]:
  return getattr(eqn.source_info.name_stack, "stack", ())


def _is_transform(scope: Any) -> bool:
  """Whether this is what JAX notes of ``jvp``, ``transpose`` or ``vmap``."""
  return type(scope).__name__ == "Transform"
