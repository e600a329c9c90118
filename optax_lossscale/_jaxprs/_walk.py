"""Walks through a jaxpr and those inside of it."""

from collections.abc import Callable, Container, Iterable, Iterator
import dataclasses
import functools

from jax.extend import core

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _places,
  _weights,
)

# The jaxprs of an equation that are walked into.
Inside = Callable[[core.JaxprEqn], Iterable[_equations.ClosedJaxpr]]
# What these return is what each of their jaxprs returns.
_HAND_BACK = _higher_order.Call, _higher_order.Cond, _higher_order.ShardMap


@dataclasses.dataclass(eq=False)
class Step:
  """An equation that was met on the way.

  Attributes:
    eqn: the equation.
    closed: the jaxpr that it stands in.
    around: the step into this jaxpr; None if the walk began in it.
    index: which of the jaxprs inside of that step it is.
    start: where the walk began.
  """

  eqn: core.JaxprEqn
  closed: _equations.ClosedJaxpr
  around: "Step | None"
  index: int
  start: _places.Place

  @functools.cached_property
  def place(self) -> _places.Place:
    """Where the equation stands. It takes a look at tracebacks."""
    outer = self.around.place if self.around else self.start
    return outer.at(self.eqn, self.closed.jaxpr)

  @property
  def way(self) -> "list[Step]":
    """This step and those around it, the innermost first."""
    return [self, *(self.around.way if self.around else [])]

  @functools.cached_property
  def call(self) -> _higher_order.HigherOrder | None:
    """What the equation calls, repeats or chooses. JAX may trace for that."""
    return _higher_order.higher_order_of(self.eqn)

  @functools.cached_property
  def times(self) -> int:
    """How often the equation runs, but for loops of unknown length.

    Under ``shard_map`` on all devices together.
    """
    if self.around is None:
      return 1
    match self.around.call:
      case _higher_order.Scan(length=length):
        return length * self.around.times
      case _higher_order.ShardMap() as mapped:
        return mapped.devices * self.around.times
      case _:
        return self.around.times

  @property
  def branches(self) -> list[tuple[core.JaxprEqn, int]]:
    """Of each ``cond`` around it, its equation and the number of the branch."""
    pairs = [(x.around, x.index) for x in self.way if x.around]
    is_cond = lambda step: isinstance(step.call, _higher_order.Cond)
    return [(step.eqn, i) for step, i in pairs if is_cond(step)]


def walk(
  closed: _equations.ClosedJaxpr,
  inside: Inside,
  *,
  only_needed: bool = False,
  used: list[bool] | None = None,
  weights: _weights.Weights | None = None,
  start: _places.Place | None = None,
  around: Step | None = None,
  index: int = 0,
) -> Iterator[Step]:
  """All equations of a jaxpr, and after each those inside of it.

  Args:
    closed: the jaxpr.
    inside: the jaxprs of an equation that are walked into.
    only_needed: whether to leave out what leads to no output.
    used: which of its outputs are used, if so; all, if not given.
    weights: what gives an equation the names of its weights, if they are known.
    start: where the walk begins.
    around: the step into the jaxpr, if it does not begin there.
    index: which of the jaxprs inside of that step it is.
  """
  eqns: Iterable[tuple[core.JaxprEqn, Container[core.Var]]] = (
    _equations.needed_equations(closed.jaxpr, used)
    if only_needed
    else ((eqn, ()) for eqn in closed.jaxpr.eqns)
  )
  for eqn, unread in eqns:
    its_used = [var not in unread for var in eqn.outvars]
    named = weights.named(eqn) if weights else eqn
    step = Step(named, closed, around, index, start or _places.Place())
    yield step
    hands_back = only_needed and isinstance(step.call, _HAND_BACK)
    for i, inner in enumerate(inside(eqn)):
      yield from walk(
        inner,
        inside,
        only_needed=only_needed,
        used=its_used if hands_back else None,
        weights=weights and weights.inside(eqn, inner),
        start=start,
        around=step,
        index=i,
      )


class Search:
  """Looks for equations of a kind, once in each jaxpr.

  Args:
    is_one: whether an equation is such.
    inside: the jaxprs of an equation that are looked into.
  """

  def __init__(
    self, is_one: Callable[[core.JaxprEqn], bool], inside: Inside
  ) -> None:
    self._is_one = is_one
    self._inside = inside
    self._found: dict[core.Jaxpr, bool] = {}

  def inside_of(self, eqn: core.JaxprEqn) -> bool:
    """Whether there is one inside of an equation."""
    # All are asked for first: what is not known here may be traced for that.
    inner = list(self._inside(eqn))
    return any(self.in_jaxpr(closed.jaxpr) for closed in inner)

  def in_jaxpr(self, jaxpr: core.Jaxpr) -> bool:
    """Whether there is one in a jaxpr, or inside of its equations."""
    if jaxpr not in self._found:
      self._found[jaxpr] = any(
        self._is_one(eqn) or self.inside_of(eqn) for eqn in jaxpr.eqns
      )
    return self._found[jaxpr]
