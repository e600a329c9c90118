"""Where an equation stands in a program, by names that a user knows."""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any, NamedTuple

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _lines

# What JAX puts among the scopes of a user.
_OF_JAX = {"", "checkpoint", "rematted_computation"}

_MARK = "autocast-"
# Before a line, it selects what is there without a path of weights, such as a
# product of weights that were updated, beside others on this line.
_NO_WEIGHTS = "no weights"


class _DtypeScope(str):
  """The scope of what `autocast` makes, which tells its dtype.

  It stays with an equation through whatever transforms it later. It has a class
  of its own, so that a scope of the user which has its name is none.
  """

  __slots__ = ()


class _WeightsScope(str):
  """The scope that tells a path of weights, or the rest of it within a call."""

  __slots__ = ()


class Names(NamedTuple):
  """The names of a place: scopes, weights and lines are three things.

  Attributes:
    scope: the scopes around it, such as ``Net/block1``; often empty.
    weights: the path of its weights, such as ``blocks/2/up``; often empty.
    both: scopes and weights in one, in the order in which they stand.
    lines: the user's lines that led here, the nearest first.
  """

  scope: str = ""
  weights: str = ""
  both: str = ""
  lines: tuple[_lines.SourceLine, ...] = ()

  def heads(self) -> dict[str, None]:
    """The names without lines, of the place and of all that is around it."""
    wholes = [whole.split("/") for whole in self[:3] if whole]
    return {
      "/".join(whole[:n]): None
      for whole in wholes
      for n in range(len(whole), 0, -1)
      if any(whole[:n])  # A key may be empty.
    }

  def all(self) -> Iterator[str]:
    """All names that select it: each alone, and with a line."""
    heads, lines = self.heads(), [x for y in self.lines for x in y.selectors]
    yield from heads
    yield from lines
    before = [*heads] if self.weights else [*heads, _NO_WEIGHTS]
    for pair in itertools.product(before, lines):
      yield place_name(*pair)

  def best(self) -> list[str]:
    """The names without lines that tell most, the shortest first.

    The path of the weights tells which layer it is, unless the scopes are those
    of a library that has the whole path. They end in the name of the layer, in
    which the last key is that of an array, if it is no number. And some have a
    plain list of weights beside them.
    """
    *layer, key = self.weights.split("/")
    last = key if key.isdigit() else ["", *layer][-1]
    is_in_list = key == self.weights and key.isdigit()
    is_full = is_in_list or last in self.scope.split("/")
    names = [self.scope if is_full else "", self.weights, self.both]
    return list(filter(None, names)) or [""]


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
  lines: tuple[_lines.SourceLine, ...] = ()
  path: tuple[str, ...] = ()

  @property
  def names(self) -> Names:
    """Its names, the same forward and backward, with and without ``vmap``."""
    weights: list[str] = []
    for name in self._of_class(_WeightsScope):
      # The backward pass may tell again what is around it: the same object.
      again = [i for i, x in enumerate(weights) if x is name]
      weights = [*weights[: again[0] if again else None], name]
    scope = _joined(self.stack, _DtypeScope, _WeightsScope)
    both = _joined(self.stack, _DtypeScope)
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
  def line(self) -> _lines.SourceLine | None:
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
    marks = self._of_class(_DtypeScope)
    return jnp.dtype(marks[-1].removeprefix(_MARK)) if marks else None

  @property
  def backward(self) -> bool:
    """Whether it is part of a backward pass.

    The backward pass of a derivative inside of the loss, such as a force, is
    part of the forward pass of the loss: if it overflows, so does the loss, and
    no loss scale helps.
    """
    # This is all that JAX leaves of derivatives, the outermost first.
    names = (x.name for x in self.stack if _is_transform(x))
    derivatives = (name for name in names if name in ("jvp", "transpose"))
    return next(derivatives, "") == "transpose"

  def within(self, eqn: core.JaxprEqn) -> "Place":
    """The place of an equation but for its lines, which take longer to find."""
    return self._replace(stack=self.stack + _stack_of(eqn))

  def at(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Place":
    """The place of an equation in the jaxpr that the walk has come to."""
    own, is_all = _lines.get_user_lines(eqn, jaxpr)
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
      # A key may be empty, or have such a name.
      if name not in _OF_JAX or isinstance(scope, _WeightsScope)
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
  return _with_scope(eqn, _WeightsScope("/".join(path))) if path else eqn


def marked(eqn: core.JaxprEqn, dtype: Any) -> core.JaxprEqn:
  """The equation, marked as one that `autocast` made for this dtype."""
  return _with_scope(eqn, _DtypeScope(f"{_MARK}{dtype}"))


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


def place_name(scope: str, source: str) -> str:
  """How reports name a place: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source]))


def telling_names(
  places: Sequence[tuple[Names, bool]],
) -> list[tuple[str, str]]:
  """For each place, the shortest name that tells it from all others.

  It is the path of its weights, or else its scopes, and a line, if they do not
  tell: the nearest one that leads to no other, or to no other without weights.
  Where there is none, it is the nearest of all. A name is that of a product,
  with its derivatives.

  Args:
    places: for each place, its names, and whether it is in a backward pass.

  Returns:
    For each of them its name; and the line that tells it from others which have
    the same name but for the line, as a string, empty if none is known.
  """
  products: dict[str, list[Names]] = {}
  for pass_ in False, True:  # A backward pass is that of a forward pass.
    its_own: dict[str, list[Names]] = {}
    for names in dict.fromkeys(
      x for x, backward in places if backward == pass_
    ):
      for head in names.heads():
        its_own.setdefault(head, []).append(names)
    products = its_own | products
  known = dict.fromkeys(names for names, _ in places)
  led_to: dict[_lines.SourceLine, list[Names]] = {}
  for names in known:
    for line in names.lines:
      led_to.setdefault(line, []).append(names)
  heads = {names: names.heads() for names in known}

  def selected(head: str, line: _lines.SourceLine) -> list[Names]:
    if head == _NO_WEIGHTS:
      return [x for x in led_to[line] if not x.weights]
    return [x for x in led_to[line] if not head or head in heads[x]]

  def told(names: Names) -> tuple[str, str]:
    best = names.best()
    telling = [x for x in best if _is_one(products.get(x, []))]
    others = [] if names.weights else [_NO_WEIGHTS]
    its_heads = [*telling, *best, *others]
    pairs = list(itertools.product(its_heads, names.lines))
    own = (
      (head, str(line))
      for head, line in pairs
      if all(_are_one(names, other) for other in selected(head, line))
    )
    nearest = str([*names.lines, ""][0])
    head, source = next(own, ([*telling, *best][0], nearest))
    return telling[0] if telling else place_name(head, source), source

  by_names = {names: told(names) for names in known}
  return [by_names[names] for names, _ in places]


def _is_one(products: list[Names]) -> bool:
  """Whether these are one product."""
  return bool(products) and all(_are_one(products[0], x) for x in products)


def _are_one(one: Names, other: Names) -> bool:
  """Whether two names are those of one product, as far as they tell."""
  return one[:3] == other[:3] and _may_be(one.lines, other.lines)


def _may_be(
  some: tuple[_lines.SourceLine, ...], other: tuple[_lines.SourceLine, ...]
) -> bool:
  """Whether two ways are one: JAX forgets lines of some equations."""
  few, many = sorted([some, other], key=len)
  rest = iter(many)
  return all(line in rest for line in few)
