"""Walks through a jaxpr and those inside of it."""

from collections.abc import Callable, Container, Iterable, Iterator
import dataclasses
import functools

from jax.extend import core

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _provenance,
  _weights,
)

# The jaxprs of an equation that are walked into.
SubjaxprsFn = Callable[[core.JaxprEqn], Iterable[_eqns.ClosedJaxpr]]
# What these return is what each of their jaxprs returns.
_PASSTHROUGH_HOPS = (
  _higher_order.Call,
  _higher_order.Cond,
  _higher_order.ShardMap,
)


@dataclasses.dataclass(eq=False)
class EqnVisit:
  """An equation that was met on the way.

  Attributes:
    eqn: the equation.
    closed_jaxpr: the jaxpr that it stands in.
    parent: the step into this jaxpr; None if the walk began in it.
    body_index: which of the jaxprs inside of that step it is.
    root_location: where the walk began.
  """

  eqn: core.JaxprEqn
  closed_jaxpr: _eqns.ClosedJaxpr
  parent: "EqnVisit | None"
  body_index: int
  root_location: _provenance.EqnLocation

  @functools.cached_property
  def location(self) -> _provenance.EqnLocation:
    """Where the equation stands. It takes a look at tracebacks."""
    parent_location = (
      self.parent.location if self.parent else self.root_location
    )
    return parent_location.locate(self.eqn, self.closed_jaxpr.jaxpr)

  @property
  def ancestors(self) -> "list[EqnVisit]":
    """This step and those around it, the innermost first."""
    return [self, *(self.parent.ancestors if self.parent else [])]

  @functools.cached_property
  def hop(self) -> _higher_order.HigherOrderOp | None:
    """What the equation calls, repeats or chooses. JAX may trace for that."""
    return _higher_order.parse_higher_order(self.eqn)

  @functools.cached_property
  def num_executions(self) -> int:
    """How often the equation runs, but for loops of unknown length.

    Under ``shard_map`` on all devices together.
    """
    if self.parent is None:
      return 1
    match self.parent.hop:
      case _higher_order.Scan(length=length):
        return length * self.parent.num_executions
      case _higher_order.ShardMap() as mapped:
        return mapped.num_devices * self.parent.num_executions
      case _:
        return self.parent.num_executions

  @property
  def cond_branches(self) -> list[tuple[core.JaxprEqn, int]]:
    """Of each ``cond`` around it, its equation and the number of the branch."""
    pairs = [(x.parent, x.body_index) for x in self.ancestors if x.parent]
    is_cond = lambda visit: isinstance(visit.hop, _higher_order.Cond)
    return [(visit.eqn, i) for visit, i in pairs if is_cond(visit)]


def walk(
  closed_jaxpr: _eqns.ClosedJaxpr,
  subjaxprs_fn: SubjaxprsFn,
  *,
  only_live: bool = False,
  used_outputs: list[bool] | None = None,
  weights: _weights.JaxprWeights | None = None,
  root_location: _provenance.EqnLocation | None = None,
  parent: EqnVisit | None = None,
  body_index: int = 0,
) -> Iterator[EqnVisit]:
  """All equations of a jaxpr, and after each those inside of it.

  Args:
    closed_jaxpr: the jaxpr.
    subjaxprs_fn: the jaxprs of an equation that are walked into.
    only_live: whether to leave out what leads to no output.
    used_outputs: which of its outputs are used, if so; all, if not given.
    weights: what gives an equation the names of its weights, if they are known.
    root_location: where the walk begins.
    parent: the step into the jaxpr, if it does not begin there.
    body_index: which of the jaxprs inside of that step it is.
  """
  eqns: Iterable[tuple[core.JaxprEqn, Container[core.Var]]] = (
    _eqns.live_eqns(closed_jaxpr.jaxpr, used_outputs)
    if only_live
    else ((eqn, ()) for eqn in closed_jaxpr.jaxpr.eqns)
  )
  for eqn, dead_vars in eqns:
    eqn_used_outputs = [var not in dead_vars for var in eqn.outvars]
    tagged_eqn = weights.tag_with_weight(eqn) if weights else eqn
    visit = EqnVisit(
      tagged_eqn,
      closed_jaxpr,
      parent,
      body_index,
      root_location or _provenance.EqnLocation(),
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
  """Looks for equations of a kind, once in each jaxpr.

  Args:
    predicate: whether an equation is such.
    subjaxprs_fn: the jaxprs of an equation that are looked into.
  """

  def __init__(
    self, predicate: Callable[[core.JaxprEqn], bool], subjaxprs_fn: SubjaxprsFn
  ) -> None:
    self._predicate = predicate
    self._subjaxprs_fn = subjaxprs_fn
    self._match_cache: dict[core.Jaxpr, bool] = {}

  def any_inside(self, eqn: core.JaxprEqn) -> bool:
    """Whether there is one inside of an equation."""
    # All are asked for first: what is not known here may be traced for that.
    subjaxprs = list(self._subjaxprs_fn(eqn))
    return any(self.any_in_jaxpr(subjaxpr.jaxpr) for subjaxpr in subjaxprs)

  def any_in_jaxpr(self, jaxpr: core.Jaxpr) -> bool:
    """Whether there is one in a jaxpr, or inside of its equations."""
    if jaxpr not in self._match_cache:
      self._match_cache[jaxpr] = any(
        self._predicate(eqn) or self.any_inside(eqn) for eqn in jaxpr.eqns
      )
    return self._match_cache[jaxpr]
