"""The products of a program that `autocast` runs in half precision."""

from typing import NamedTuple

from jax.extend import core
import numpy as np

from optax_lossscale import _jaxprs


class Row(NamedTuple):
  """Products of one kind in one place, which are told of together.

  Attributes:
    primitive: JAX's name of the operation.
    names: the names of its place.
    backward: whether it belongs to a backward pass.
    dtype: the half precision.
  """

  primitive: str
  names: _jaxprs.Names
  backward: bool
  dtype: np.dtype


class Rows:
  """The products of a program, by where they stand.

  They are known by the mark of `autocast`, which goes wherever an equation
  goes. So nothing is decided here that was decided there.

  Attributes:
    all: all of them, in the order of the program.
    names: for each, the shortest name that tells its place from all others.
    sources: for each, the line that tells it from others of a like name.
    dtypes: their half precisions: mostly one.
    not_entered: the names of what holds products and cannot be entered.
  """

  def __init__(self, closed: _jaxprs.ClosedJaxpr) -> None:
    self.all: list[Row] = []
    self.not_entered: list[str] = []
    self._numbers: dict[Row, int] = {}
    self._marks = _jaxprs.Search(_is_marked, _jaxprs.held_jaxprs)
    self._find(closed)
    told = _jaxprs.telling_names([(x.names, x.backward) for x in self.all])
    self.names = [name for name, _ in told]
    self.sources = [source for _, source in told]
    self.dtypes = {row.dtype for row in self.all}

  def number(
    self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr, place: _jaxprs.Place
  ) -> int | None:
    """The number of the row of a product; None of all else."""
    if not _jaxprs.is_matrix_product(eqn) or place.within(eqn).mark is None:
      return None
    at = place.at(eqn, jaxpr)
    row = Row(_jaxprs.name_of(eqn), at.names, at.backward, at.mark)
    if row not in self._numbers:
      self._numbers[row] = len(self.all)
      self.all.append(row)
    return self._numbers[row]

  def by_name(self) -> list[list[int]]:
    """The numbers of the rows of each place."""
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(self.names):
      numbers.setdefault(name, []).append(i)
    return list(numbers.values())

  def are_in(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are marks in the jaxprs that an equation holds."""
    return self._marks.inside_of(eqn)

  def _find(self, closed: _jaxprs.ClosedJaxpr) -> None:
    """Finds all products of a jaxpr, and of what it calls."""

    def inside(eqn: core.JaxprEqn) -> list[_jaxprs.ClosedJaxpr]:
      part = part_to_run(eqn) if self.are_in(eqn) else None
      return _jaxprs.bodies_of(part) if part else []

    def needed(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
      return [eqn for eqn, _ in _jaxprs.needed_equations(jaxpr)]

    for step in _jaxprs.walk(closed, inside, equations=needed):
      outer = step.around.place if step.around else _jaxprs.Place()
      self.number(step.eqn, step.jaxpr, outer)
      if self.are_in(step.eqn) and part_to_run(step.eqn) is None:
        name = _jaxprs.name_of(step.eqn)
        self.not_entered.append(_jaxprs.place_name(name, step.place.name))


def _is_marked(eqn: core.JaxprEqn) -> bool:
  return _jaxprs.Place().within(eqn).mark is not None


def part_to_run(eqn: core.JaxprEqn) -> _jaxprs.Part | None:
  """What an equation calls, repeats or chooses; None if it is not entered."""
  part = _jaxprs.part_of(eqn)
  if not isinstance(part, _jaxprs.HiScan):
    return part
  # Its carry is kept in references, which only plain equations can do without.
  plain = _jaxprs.lowered(eqn)
  return None if plain is None else _jaxprs.Call(plain)
