"""Traversals of a jaxpr and its sub-jaxprs.

They are a visitor, a cached search, and a forward dataflow analysis.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _provenance,
  _weights,
)

# Returns the jaxprs of an equation that a traversal enters.
SubjaxprsFn = Callable[[core.JaxprEqn], Iterable[_eqns.ClosedJaxpr]]
# The sources that reach a value. They have any class, such as an argument.
Labels = frozenset[Any]
NOTHING = Labels()
# The outputs of these are the outputs of their jaxprs, so an unused output of
# the equation is unused in the jaxpr. The unused carry of a loop may be used by
# the next iteration.
_PASSTHROUGH_HOPS = (
  _higher_order.Call,
  _higher_order.Cond,
  _higher_order.ShardMap,
)


@dataclasses.dataclass(eq=False)
class EqnVisit:
  """The visit of one equation by :func:`walk`.

  A jaxpr that is called twice is visited twice, with different parents.

  Attributes:
    eqn: the equation; a matmul has the path of its weights in its name stack if
      these are known.
    closed_jaxpr: the jaxpr that contains it.
    parent: the visit of the equation that contains this jaxpr; None in the
      outermost jaxpr.
    body_index: the index of this jaxpr among the jaxprs of the parent that the
      walk enters.
    eqn_index: the index of the equation in this jaxpr.
    root_location: the location of the outermost jaxpr.
  """

  eqn: core.JaxprEqn
  closed_jaxpr: _eqns.ClosedJaxpr
  parent: "EqnVisit | None"
  body_index: int
  eqn_index: int
  root_location: _provenance.EqnLocation = _provenance.ROOT_LOCATION

  @functools.cached_property
  def location(self) -> _provenance.EqnLocation:
    """The location of the equation. To find it, tracebacks are read."""
    parent_location = (
      self.parent.location if self.parent else self.root_location
    )
    return parent_location.locate(self.eqn, self.closed_jaxpr.jaxpr)

  @functools.cached_property
  def stack_location(self) -> _provenance.EqnLocation:
    """The location of the equation without its lines, which is cheaper."""
    parent = self.parent
    location = parent.stack_location if parent else self.root_location
    return location.push_scope(self.eqn)

  @functools.cached_property
  def path(self) -> tuple[int, ...]:
    """The position of the equation: see ``_state_threading.Path``."""
    prefix = (*self.parent.path, self.body_index) if self.parent else ()
    return *prefix, self.eqn_index

  @property
  def self_and_ancestors(self) -> "list[EqnVisit]":
    """This visit and its enclosing visits, the innermost first."""
    return [self, *(self.parent.self_and_ancestors if self.parent else [])]

  @functools.cached_property
  def hop(self) -> _higher_order.HigherOrderOp | None:
    """The parts of a higher-order equation. Parsing one of hijax traces it."""
    return _higher_order.parse_higher_order(self.eqn)

  @functools.cached_property
  def num_executions(self) -> int:
    """The number of times that the equation runs, on all devices in total.

    The iterations of a ``while`` are unknown and count as one.
    """
    if self.parent is None:
      return 1
    match self.parent.hop:
      case _higher_order.Scan(length=length):
        return length * self.parent.num_executions
      case _higher_order.ShardMap() as shard_map:
        return shard_map.num_devices * self.parent.num_executions
      case _:
        return self.parent.num_executions

  @property
  def cond_branches(self) -> list[tuple[core.JaxprEqn, int]]:
    """The equation and the branch index of each enclosing ``cond``."""
    return [
      (visit.parent.eqn, visit.body_index)
      for visit in self.self_and_ancestors
      if visit.parent and isinstance(visit.parent.hop, _higher_order.Cond)
    ]


def walk(
  closed_jaxpr: _eqns.ClosedJaxpr,
  subjaxprs_fn: SubjaxprsFn,
  *,
  only_live: bool = False,
  used_outputs: list[bool] | None = None,
  weights: _weights.JaxprWeights | None = None,
  root_location: _provenance.EqnLocation = _provenance.ROOT_LOCATION,
  parent: EqnVisit | None = None,
  body_index: int = 0,
) -> Iterator[EqnVisit]:
  """Visit all equations of a jaxpr and its sub-jaxprs, depth-first.

  Args:
    closed_jaxpr: the jaxpr.
    subjaxprs_fn: returns the jaxprs of an equation to enter.
    only_live: whether to skip dead code.
    used_outputs: a mask of the outputs of the jaxpr, for ``only_live``; by
      default all of them are used.
    weights: the weights in the jaxpr, if known. The visited equations are then
      tagged with their parameter paths.
    root_location: the location of the outermost jaxpr.
    parent: the visit of the equation that contains the jaxpr, for the
      recursion.
    body_index: the index of the jaxpr among the jaxprs of the parent.

  Yields:
    The visits.
  """
  eqns: Iterable[tuple[int, core.JaxprEqn, list[bool] | None]] = (
    _eqns.live_eqns(closed_jaxpr.jaxpr, used_outputs)
    if only_live
    else ((i, eqn, None) for i, eqn in enumerate(closed_jaxpr.jaxpr.eqns))
  )
  for eqn_index, eqn, eqn_used_outputs in eqns:
    visit = EqnVisit(
      weights.tag_with_weight(eqn) if weights else eqn,
      closed_jaxpr,
      parent,
      body_index,
      eqn_index,
      root_location,
    )
    yield visit
    returns_body_outputs = only_live and isinstance(
      visit.hop, _PASSTHROUGH_HOPS
    )
    for i, subjaxpr in enumerate(subjaxprs_fn(eqn)):
      yield from walk(
        subjaxpr,
        subjaxprs_fn,
        only_live=only_live,
        used_outputs=eqn_used_outputs if returns_body_outputs else None,
        weights=weights and weights.get_body_weights(eqn, subjaxpr),
        root_location=root_location,
        parent=visit,
        body_index=i,
      )


class EqnSearch:
  """A search for equations, which caches its result for each jaxpr.

  Args:
    predicate: returns whether an equation matches.
    subjaxprs_fn: returns the jaxprs of an equation to search.
  """

  def __init__(
    self, predicate: Callable[[core.JaxprEqn], bool], subjaxprs_fn: SubjaxprsFn
  ) -> None:
    self._predicate = predicate
    self._subjaxprs_fn = subjaxprs_fn
    self._match_cache: dict[core.Jaxpr, bool] = {}

  def any_inside(self, eqn: core.JaxprEqn) -> bool:
    """Return whether an equation matches in the sub-jaxprs of an equation."""
    # The list is complete before the recursion, so a generator that lowers an
    # equation of hijax doesn't trace in the middle of another search.
    subjaxprs = list(self._subjaxprs_fn(eqn))
    return any(self.any_in_jaxpr(subjaxpr.jaxpr) for subjaxpr in subjaxprs)

  def any_in_jaxpr(self, jaxpr: core.Jaxpr) -> bool:
    """Return whether an equation matches in a jaxpr or its sub-jaxprs."""
    if jaxpr not in self._match_cache:
      self._match_cache[jaxpr] = any(
        self._predicate(eqn) or self.any_inside(eqn) for eqn in jaxpr.eqns
      )
    return self._match_cache[jaxpr]


class Dataflow(abc.ABC):
  """Propagates labels from the inputs of a program to its outputs.

  Several labels are joined by their union. Constants have none.
  """

  def __init__(self) -> None:
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)

  @abc.abstractmethod
  def transfer(self, visit: EqnVisit, operands: list[Labels]) -> list[Labels]:
    """Return what reaches each output of an equation without bodies.

    Args:
      visit: the visit of the equation.
      operands: what reaches each of its inputs.
    """

  def end_iteration(
    self, jaxpr: core.Jaxpr, path: tuple[int, ...], outs: list[Labels]
  ) -> list[Labels]:
    """Return what a reader of the outputs of a loop body receives.

    Args:
      jaxpr: the body.
      path: its position.
      outs: what reaches the outputs.
    """
    del jaxpr, path  # By default, nothing changes.
    return outs

  def propagate_jaxpr(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: Sequence[Labels],
    parent: EqnVisit | None = None,
    body_index: int = 0,
  ) -> list[Labels]:
    """Return what reaches each output of a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      inputs: what reaches each of its inputs.
      parent: the visit of the equation that contains the jaxpr.
      body_index: the index of the jaxpr among the bodies of this equation.
    """
    jaxpr = closed_jaxpr.jaxpr
    env: dict[Any, Labels] = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: (
      NOTHING if isinstance(atom, core.Literal) else env.get(atom, NOTHING)
    )
    for i, eqn in enumerate(jaxpr.eqns):
      visit = EqnVisit(eqn, closed_jaxpr, parent, body_index, i)
      outs = self.propagate_eqn(visit, list(map(read, eqn.invars)))
      env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))

  def propagate_eqn(
    self, visit: EqnVisit, operands: list[Labels]
  ) -> list[Labels]:
    """Return what reaches each output of an equation. Subclasses extend it."""
    # With JAX's upgrade flags, a tag is a call.
    is_tag = _eqns.get_primitive_name(visit.eqn) == "name"
    hop = None if is_tag else self._parse_higher_order(visit.eqn)
    match hop:
      case None:
        return self.transfer(visit, operands)
      case _higher_order.Scan() | _higher_order.While():
        return self.propagate_loop(visit, hop, operands)
      case _:
        bodies = _higher_order.pair_bodies_with_inputs(hop, operands)
        outs = [
          self.propagate_jaxpr(body, inputs, visit, i)
          for i, (body, inputs) in enumerate(bodies)
        ]
        return list(map(NOTHING.union, *outs))

  def propagate_loop(
    self,
    visit: EqnVisit,
    loop: _higher_order.Scan | _higher_order.While,
    operands: list[Labels],
  ) -> list[Labels]:
    """Return what reaches each output of a loop. Subclasses extend it."""
    *_, consts, carry, slices = (
      loop.split(operands)
      if isinstance(loop, _higher_order.Scan)
      else (*loop.split(operands), ())
    )
    body_index = len(_higher_order.get_bodies(loop)) - 1
    while True:  # It ends, since each round adds labels.
      inputs = [*consts, *carry, *slices]
      outs = self.propagate_jaxpr(loop.body, inputs, visit, body_index)
      path = *visit.path, body_index
      outs = self.end_iteration(loop.body.jaxpr, path, outs)
      joined = list(map(NOTHING.union, carry, outs))
      if joined == list(carry):
        return [*joined, *outs[len(joined) :]]
      carry = joined
