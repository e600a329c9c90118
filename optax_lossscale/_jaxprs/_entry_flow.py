"""Which arguments, gradients and random numbers reach an array entry by entry.

A new parameter is computed from the old one, its gradient and its moments,
entry by entry: all of them have one shape. The norm of all gradients, by which
a step clips them, is a scalar, and mixes no entries of two arrays.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs import (
  _eqns,
  _higher_order,
  _provenance,
  _tagged_values,
)

# The index of an argument, a tag, or one of the strings below.
Label = int | str
Labels = frozenset[Label]
# The entries depend on random numbers, other than through a gradient.
RANDOM = "random"
# The array depends on a gradient, by entries or not.
AFTER_GRADIENT = "after gradient"

_NOTHING = Labels()
_RANDOM_PRIMITIVES = {
  "random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32",
}  # fmt: skip


class EntryFlow:
  """The sources of each result of a program, entry by entry.

  Args:
    closed_jaxpr: the program.
    is_gradient: returns whether a tag marks a gradient. What a gradient depends
      on is not followed.

  Attributes:
    labels: what reaches each output.
    in_loss: the arguments that enter a function that is differentiated.
    before_gradients: the arguments from which gradients are computed by
      entries where they have a tag, such as a sum of earlier ones.
  """

  def __init__(
    self, closed_jaxpr: _eqns.ClosedJaxpr, is_gradient: Callable[[str], bool]
  ) -> None:
    self._is_gradient = is_gradient
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)
    self.in_loss: set[int] = set()
    self.before_gradients: set[int] = set()
    inputs = [Labels({i}) for i, _ in enumerate(closed_jaxpr.jaxpr.invars)]
    location = _provenance.EqnLocation()
    self.labels = self._propagate(closed_jaxpr, inputs, location)

  def list_arguments(self, output_index: int) -> set[int]:
    """Return the arguments that reach an output entry by entry."""
    return _list_arguments([self.labels[output_index]])

  def _propagate(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    inputs: Sequence[Labels],
    location: _provenance.EqnLocation,
  ) -> list[Labels]:
    """Return what reaches each output of a jaxpr."""
    jaxpr = closed_jaxpr.jaxpr
    env: dict[Any, Labels] = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda atom: (
      _NOTHING
      if isinstance(atom, core.Literal)
      else env.get(atom, _NOTHING)  # A constant has no source.
    )
    for eqn in jaxpr.eqns:
      operands = list(map(read, eqn.invars))
      outs = self._propagate_eqn(eqn, operands, location.push_scope(eqn))
      env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))

  def _propagate_eqn(
    self,
    eqn: core.JaxprEqn,
    operands: list[Labels],
    location: _provenance.EqnLocation,
  ) -> list[Labels]:
    tag = _tagged_values.get_tag(eqn)
    if tag is not None and self._is_gradient(tag):
      self.before_gradients |= _list_arguments(operands)
      return [Labels({tag, AFTER_GRADIENT})]
    if location.is_backward:
      return [_NOTHING] * len(eqn.outvars)
    if location.is_differentiated:
      self.in_loss |= _list_arguments(operands)
    if eqn.primitive.name in _RANDOM_PRIMITIVES:
      return [Labels({RANDOM})] * len(eqn.outvars)
    hop = None if tag is not None else self._parse_higher_order(eqn)
    match hop:
      case None:
        return [_join_entries(eqn, operands, var) for var in eqn.outvars]
      case _higher_order.Scan() | _higher_order.While():
        return self._propagate_loop(hop, operands, location)
      case _:
        outs = [
          self._propagate(body, body_inputs, location)
          for body, body_inputs in _higher_order.pair_bodies_with_inputs(
            hop, operands
          )
        ]
        return list(map(_NOTHING.union, *outs))

  def _propagate_loop(
    self,
    loop: _higher_order.Scan | _higher_order.While,
    operands: list[Labels],
    location: _provenance.EqnLocation,
  ) -> list[Labels]:
    *_, consts, carry, slices = (
      loop.split(operands)
      if isinstance(loop, _higher_order.Scan)
      else (*loop.split(operands), ())
    )
    while True:  # It ends, since each round adds labels.
      inputs = [*consts, *carry, *slices]
      outs = self._propagate(loop.body, inputs, location)
      joined = list(map(_NOTHING.union, carry, outs))
      if joined == list(carry):
        return [*joined, *outs[len(joined) :]]
      carry = joined


def _list_arguments(operands: Sequence[Labels]) -> set[int]:
  return {x for labels in operands for x in labels if isinstance(x, int)}


def _join_entries(
  eqn: core.JaxprEqn, operands: Sequence[Labels], var: Any
) -> Labels:
  """Return what reaches an output of an equation without sub-jaxprs."""
  shape = _eqns.get_shape(var)
  return _NOTHING.union(
    *(
      labels if _eqns.get_shape(atom) == shape else labels & {AFTER_GRADIENT}
      for atom, labels in zip(eqn.invars, operands, strict=True)
    )
  )
