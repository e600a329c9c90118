"""The names of places, and the shortest that tells one from all others."""

from collections.abc import Iterator, Sequence
import itertools
from typing import NamedTuple

from optax_lossscale._jaxprs._lines import Line


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
  lines: tuple[Line, ...] = ()

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
    heads, lines = self.heads(), [x for y in self.lines for x in y.names]
    yield from heads
    yield from lines
    for pair in itertools.product(heads, lines):
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


def place_name(scope: str, source: str) -> str:
  """How reports name a place: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source]))


def telling_names(
  places: Sequence[tuple[Names, bool]],
) -> list[tuple[str, str]]:
  """For each place, the shortest name that tells it from all others.

  It is the path of its weights, or else its scopes, and a line, if they do not
  tell: the nearest one that leads to no other. Where there is none, it is the
  nearest of all. A name is that of a product, with its derivatives.

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
  led_to: dict[Line, list[Names]] = {}
  for names in known:
    for line in names.lines:
      led_to.setdefault(line, []).append(names)
  heads = {names: names.heads() for names in known}

  def selected(head: str, line: Line) -> list[Names]:
    return [x for x in led_to[line] if not head or head in heads[x]]

  def told(names: Names) -> tuple[str, str]:
    best = names.best()
    telling = [x for x in best if _is_one(products.get(x, []))]
    pairs = list(itertools.product([*telling, *best], names.lines))
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


def _may_be(some: tuple[Line, ...], other: tuple[Line, ...]) -> bool:
  """Whether two ways are one: JAX forgets lines of some equations."""
  few, many = sorted([some, other], key=len)
  rest = iter(many)
  return all(line in rest for line in few)
