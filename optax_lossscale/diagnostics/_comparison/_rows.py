"""The products of a program that may run in half precision."""

from typing import NamedTuple

from jax.extend import core

from optax_lossscale import _jaxprs
from optax_lossscale._autocast import _kept, _products


class Row(NamedTuple):
  """Products of one kind in one place, which are told of together.

  Attributes:
    primitive: JAX's name of the operation.
    scope: the scopes around it.
    source: the user's line.
    backward: whether it belongs to a backward pass.
  """

  primitive: str
  scope: str
  source: str
  backward: bool

  @property
  def name(self) -> str:
    """How a pattern names the place."""
    return _jaxprs.place_name(self.scope, self.source)


class Rows:
  """The products of a program, by where they stand.

  Attributes:
    all: all of them, in the order of the program.
    not_entered: what holds products and cannot be entered.
  """

  def __init__(self, kept: _kept.Kept) -> None:
    self.all: list[Row] = []
    self.not_entered: list[str] = []
    self._kept = kept
    self._numbers: dict[Row, int] = {}
    self._search = _products.Search()

  def number(
    self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, place: _jaxprs.Place
  ) -> int | None:
    """The number of the row of a product; None if it is none, or is kept."""
    if not _products.is_product(eqn):
      return None
    its_place = place.at(eqn, jaxpr)
    if self._kept.patterns and self._kept.holds(its_place):
      return None
    name = _jaxprs.name_of(eqn)
    row = Row(name, its_place.scope, its_place.source, its_place.backward)
    if row not in self._numbers:
      self._numbers[row] = len(self.all)
      self.all.append(row)
    return self._numbers[row]

  def by_name(self) -> dict[str, list[int]]:
    """The numbers of the rows of each place."""
    numbers: dict[str, list[int]] = {}
    for i, row in enumerate(self.all):
      numbers.setdefault(row.name, []).append(i)
    return numbers

  def are_in(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products in the jaxprs that an equation holds."""
    return self._search.finds_in(eqn)

  def find(self, jaxpr: core.Jaxpr, place: _jaxprs.Place) -> None:
    """Finds all products of a jaxpr, and of what it calls."""
    for eqn, _ in _jaxprs.needed_equations(jaxpr):
      if _products.is_product(eqn):
        self.number(eqn, jaxpr, place)
      elif self.are_in(eqn):
        inside = _bodies_of(part_of(eqn))
        its_place = place.at(eqn, jaxpr)
        for closed in inside:
          self.find(closed.jaxpr, its_place)
        if not inside:
          name = _jaxprs.name_of(eqn)
          where = _jaxprs.place_name(its_place.scope, its_place.source)
          self.not_entered.append(f"{name} at {where}" if where else name)


Part = (
  _jaxprs.ClosedJaxpr
  | _jaxprs.Scan
  | _jaxprs.While
  | _jaxprs.Cond
  | _jaxprs.ShardMap
)


def part_of(eqn: core.JaxprEqn) -> Part | None:
  """What an equation calls, repeats or chooses; None if it is not entered."""
  looks = (
    _called_of,
    _jaxprs.scan_of,
    _jaxprs.while_of,
    _jaxprs.cond_of,
    _jaxprs.shard_map_of,
  )
  parts = (look(eqn) for look in looks)
  return next((part for part in parts if part is not None), None)


def _called_of(eqn: core.JaxprEqn) -> _jaxprs.ClosedJaxpr | None:
  """What an equation does nothing but call, if that is so."""
  primitive = _jaxprs.hi_primitive(eqn)
  if primitive is None:
    return _jaxprs.called_jaxpr(eqn)
  # Of other primitives of hijax it is not known whether autocast enters them.
  is_known = type(primitive).__name__ in _jaxprs.BEHAVES_LIKE
  return _jaxprs.hi_call_of(eqn) if is_known else None


def _bodies_of(part: Part | None) -> list[_jaxprs.ClosedJaxpr]:
  match part:
    case None:
      return []
    case _jaxprs.Scan() | _jaxprs.ShardMap():
      return [part.body]
    case _jaxprs.While():
      return [part.condition, part.body]
    case _jaxprs.Cond():
      return list(part.branches)
    case called:
      return [called]
