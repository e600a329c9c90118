"""Forward dataflow analyses: which labels reach each value of a program.

A subclass of :class:`Dataflow` says what an equation does. The traversal of
calls, branches and loops is the same for all.
"""

import abc
from collections.abc import Sequence
import functools
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _tagged_values,
  _walk,
)

# What reaches a value: sources of any class, such as arguments.
Labels = frozenset[Any]
NOTHING = Labels()


class Dataflow(abc.ABC):
  """Propagates labels from the inputs of a program to its outputs.

  Several labels are joined by their union. Constants have none.
  """

  def __init__(self) -> None:
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)

  @abc.abstractmethod
  def transfer(
    self, visit: _walk.EqnVisit, operands: list[Labels]
  ) -> list[Labels]:
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
    parent: _walk.EqnVisit | None = None,
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
      visit = _walk.EqnVisit(eqn, closed_jaxpr, parent, body_index, i)
      outs = self.propagate_eqn(visit, list(map(read, eqn.invars)))
      env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))

  def propagate_eqn(
    self, visit: _walk.EqnVisit, operands: list[Labels]
  ) -> list[Labels]:
    """Return what reaches each output of an equation. Subclasses extend it."""
    # With JAX's upgrade flags, a tag is a call.
    is_tag = _tagged_values.get_tag(visit.eqn) is not None
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
    visit: _walk.EqnVisit,
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
