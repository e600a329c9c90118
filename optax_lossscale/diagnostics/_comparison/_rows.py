"""The products of a program that `autocast` runs in half precision."""

from typing import NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale import _jaxprs


class Row(NamedTuple):
  """Products of one kind in one place, which are told of together.

  Attributes:
    primitive: JAX's name of the operation.
    scope: the scopes around it.
    lines: the user's lines that led there.
    backward: whether it belongs to a backward pass.
    dtype: the half precision.
  """

  primitive: str
  scope: str
  lines: tuple[_jaxprs.Line, ...]
  backward: bool
  dtype: np.dtype


class Rows:
  """The products of a program, by where they stand.

  They are known by the mark of `autocast`, which goes wherever an equation
  goes. So nothing is decided here that was decided there.

  Attributes:
    all: all of them, in the order of the program.
    sources: for each, the line that tells it from others in its scope.
    dtypes: their half precisions: mostly one.
    not_entered: the names of what holds products and cannot be entered.
  """

  def __init__(self, closed: _jaxprs.ClosedJaxpr) -> None:
    self.all: list[Row] = []
    self.not_entered: list[str] = []
    self._numbers: dict[Row, int] = {}
    self._found: dict[core.Jaxpr, bool] = {}
    self._find(closed.jaxpr, _jaxprs.Place())
    places = [(row.scope, row.lines) for row in self.all]
    self.sources = _jaxprs.telling_lines(places)
    self.dtypes = {row.dtype for row in self.all}

  def number(
    self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, place: _jaxprs.Place
  ) -> int | None:
    """The number of the row of a product; None of all else."""
    if not _jaxprs.is_matrix_product(eqn) or place.within(eqn).mark is None:
      return None
    at = place.at(eqn, jaxpr)
    row = Row(_jaxprs.name_of(eqn), at.scope, at.lines, at.backward, at.mark)
    if row not in self._numbers:
      self._numbers[row] = len(self.all)
      self.all.append(row)
    return self._numbers[row]

  def by_name(self) -> list[list[int]]:
    """The numbers of the rows of each place."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for i, source in enumerate(self.sources):
      numbers.setdefault((self.all[i].scope, source), []).append(i)
    return list(numbers.values())

  def are_in(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are marks in the jaxprs that an equation holds."""
    held = list(_jaxprs.held_jaxprs(eqn))
    return any(self._are_in(closed.jaxpr) for closed in held)

  def _are_in(self, jaxpr: core.Jaxpr) -> bool:
    if jaxpr not in self._found:
      self._found[jaxpr] = any(
        _jaxprs.Place().within(eqn).mark is not None or self.are_in(eqn)
        for eqn in jaxpr.eqns
      )
    return self._found[jaxpr]

  def _find(self, jaxpr: core.Jaxpr, place: _jaxprs.Place) -> None:
    """Finds all products of a jaxpr, and of what it calls."""
    for eqn, _ in _jaxprs.needed_equations(jaxpr):
      if self.number(eqn, jaxpr, place) is not None or not self.are_in(eqn):
        continue
      its_place = place.at(eqn, jaxpr)
      part = part_to_run(eqn)
      for closed in _jaxprs.bodies_of(part) if part else ():
        self._find(closed.jaxpr, its_place)
      if part is None:
        where = _jaxprs.place_name(its_place.scope, its_place.source)
        name = _jaxprs.place_name(_jaxprs.name_of(eqn), where)
        self.not_entered.append(name)


def part_to_run(eqn: core.JaxprEqn) -> _jaxprs.Part | None:
  """What an equation calls, repeats or chooses; None if it is not entered."""
  part = _jaxprs.part_of(eqn)
  if not isinstance(part, _jaxprs.HiScan):
    return part
  # Its carry is kept in references, which only plain equations can do without.
  plain = _jaxprs.lowered(eqn)
  return None if plain is None else _jaxprs.Call(plain)
