"""The products of a program that `autocast` runs in half precision."""

import functools
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
    higher_order_of: what an equation calls, repeats or chooses; None if it is
      not known.
    are_in: whether there are marks in the jaxprs that an equation holds.
  """

  def __init__(self, closed: _jaxprs.ClosedJaxpr) -> None:
    alone = functools.partial(is_marked, around=_jaxprs.Place())
    self.are_in = _jaxprs.Search(alone, _jaxprs.held_jaxprs).inside_of
    self.higher_order_of = functools.cache(_jaxprs.higher_order_of)
    self.not_entered: list[str] = []
    self._numbers: dict[Row, int] = {}
    for step in _jaxprs.walk(closed, self._inside, only_needed=True):
      around = step.around.place if step.around else _jaxprs.Place()
      if is_product(step.eqn, around):
        self._numbers.setdefault(_row(step.eqn, step.place), len(self._numbers))
      elif self.are_in(step.eqn) and self.higher_order_of(step.eqn) is None:
        name = _jaxprs.name_of(step.eqn)
        self.not_entered.append(_jaxprs.place_name(name, step.place.name))
    self.all = list(self._numbers)
    told = _jaxprs.telling_names([(x.names, x.backward) for x in self.all])
    self.names = [name for name, _ in told]
    self.sources = [source for _, source in told]
    self.dtypes = {row.dtype for row in self.all}

  def number(self, eqn: core.JaxprEqn, place: _jaxprs.Place) -> int | None:
    """The row of a product at this place; None if nothing reads its result."""
    return self._numbers.get(_row(eqn, place))

  def by_name(self) -> list[list[int]]:
    """The numbers of the rows of each place."""
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(self.names):
      numbers.setdefault(name, []).append(i)
    return list(numbers.values())

  def _inside(self, eqn: core.JaxprEqn) -> list[_jaxprs.ClosedJaxpr]:
    call = self.higher_order_of(eqn) if self.are_in(eqn) else None
    return _jaxprs.bodies_of(call) if call else []


def is_product(eqn: core.JaxprEqn, around: _jaxprs.Place) -> bool:
  """Whether this is a product that `autocast` runs in half precision."""
  return _jaxprs.is_matrix_product(eqn) and is_marked(eqn, around)


def is_marked(eqn: core.JaxprEqn, around: _jaxprs.Place) -> bool:
  """Whether `autocast` made this equation, or what is around it."""
  return around.within(eqn).mark is not None


def _row(eqn: core.JaxprEqn, place: _jaxprs.Place) -> Row:
  name = _jaxprs.name_of(eqn)
  return Row(name, place.names, place.backward, place.mark)
