"""Dependence analysis: which labels does each value of a program depend on?

A label is a source of data, such as a loss scale. An output of an equation has
the labels of all its inputs, whatever the primitive computes. Branches are
joined, and loops are iterated to the fixpoint. Only floats carry labels: a mask
or an index that depends on a gradient is not a gradient. Control dependence
(the predicate of a branch or a loop) is ignored, too.

A set of labels is an int with a bit for each label.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, Protocol

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _eqns,
  _harvest,
  _higher_order,
  _provenance,
  _walk,
)

# With several operands, each output depends on the operand at its position.
_PER_OPERAND_PRIMITIVES = {
  "optimization_barrier", "pmax", "pmin", "psum", "psum_invariant",
}  # fmt: skip


class TransferRules(Protocol):
  """The transfer functions of an analysis, for tags and for other equations."""

  def transfer_tag(
    self, eqn: core.JaxprEqn, tag: str, labels: int, is_final: bool
  ) -> int:
    """Return the labels of a tagged value.

    Args:
      eqn: the equation of the tag.
      tag: the name that ``checkpoint_name`` gives to the value.
      labels: the labels of the value.
      is_final: whether the labels are complete; False in an iteration before
        the fixpoint. True once for each occurrence of the tag in the program.
    """

  def transfer_output(
    self,
    eqn: core.JaxprEqn,
    aval: Any,
    operand_labels: Sequence[int],
    is_backward: bool,
  ) -> int:
    """Return the labels of an output of an equation.

    Args:
      eqn: the equation.
      aval: the type of the output.
      operand_labels: the labels of each input on which the output depends.
      is_backward: whether the equation is part of a backward pass.
    """


def propagate_labels(
  closed_jaxpr: _eqns.ClosedJaxpr,
  input_labels: Sequence[int],
  rules: TransferRules,
) -> list[int]:
  """Propagate labels through a program.

  Args:
    closed_jaxpr: the jaxpr.
    input_labels: the labels of each input.
    rules: the rules.

  Returns:
    The labels of each output.
  """
  return _DependenceAnalysis(rules).propagate(
    closed_jaxpr, input_labels, False, True
  )


class _DependenceAnalysis:
  """An interpreter of jaxprs over sets of labels, which caches its results."""

  def __init__(self, rules: TransferRules) -> None:
    self._rules = rules
    has_tag = lambda eqn: _harvest.get_tag(eqn) is not None
    self._tag_search = _walk.EqnSearch(has_tag, _eqns.subjaxprs)
    self._parse_higher_order = functools.cache(_higher_order.parse_higher_order)
    self._out_labels: dict[Any, list[int]] = {}

  def propagate(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    input_labels: Sequence[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    """Return the labels of the outputs of a jaxpr.

    Args:
      closed_jaxpr: the jaxpr.
      input_labels: the labels of each input.
      is_backward: whether the jaxpr is called in a backward pass.
      is_final: whether the labels of the inputs are complete.
    """
    # The rules must see each tag once with its final labels, so a jaxpr with
    # tags must not come from the cache then.
    if is_final and self._tag_search.any_in_jaxpr(closed_jaxpr.jaxpr):
      return self._propagate_eqns(closed_jaxpr, input_labels, is_backward, True)
    # A jaxpr without tags has the same result whether or not this is final.
    key = closed_jaxpr.jaxpr, tuple(input_labels), is_backward
    if key not in self._out_labels:
      self._out_labels[key] = self._propagate_eqns(
        closed_jaxpr, input_labels, is_backward, False
      )
    return self._out_labels[key]

  def _propagate_eqns(
    self,
    closed_jaxpr: _eqns.ClosedJaxpr,
    input_labels: Sequence[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    # Dead code counts, too: a tag may have a value that no equation reads.
    # Constants have no labels, hence the default 0.
    env = dict(zip(closed_jaxpr.jaxpr.invars, input_labels, strict=True))
    read_labels = lambda atoms: [
      0 if isinstance(atom, core.Literal) else env.get(atom, 0)
      for atom in atoms
    ]
    for eqn in closed_jaxpr.jaxpr.eqns:
      out_labels = self._propagate_eqn(
        eqn, read_labels(eqn.invars), is_backward, is_final
      )
      env.update(zip(eqn.outvars, out_labels, strict=True))
    return read_labels(closed_jaxpr.jaxpr.outvars)

  def _propagate_eqn(
    self,
    eqn: core.JaxprEqn,
    input_labels: list[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    is_backward = (
      is_backward or _provenance.EqnLocation().push_scope(eqn).is_backward
    )
    tag = _harvest.get_tag(eqn)
    if tag is not None:
      return [self._rules.transfer_tag(eqn, tag, input_labels[0], is_final)]
    hop = self._parse_higher_order(eqn)
    if hop is None:
      return self._transfer_eqn(eqn, input_labels, is_backward)
    propagate = functools.partial(self.propagate, is_backward=is_backward)
    return _propagate_hop(hop, input_labels, propagate, is_final)

  def _transfer_eqn(
    self, eqn: core.JaxprEqn, input_labels: list[int], is_backward: bool
  ) -> list[int]:
    operand_labels = [input_labels] * len(eqn.outvars)
    if eqn.primitive.name in _PER_OPERAND_PRIMITIVES:
      operand_labels = [[x] for x in input_labels]
    return [
      self._rules.transfer_output(eqn, var.aval, x, is_backward)
      if _is_inexact(var.aval)
      else 0
      for var, x in zip(eqn.outvars, operand_labels, strict=True)
    ]


# Propagates labels through one jaxpr.
_PropagateFn = Callable[..., list[int]]


def _propagate_hop(
  hop: _higher_order.HigherOrderOp,
  input_labels: list[int],
  propagate: _PropagateFn,
  is_final: bool,
) -> list[int]:
  """Return the labels of the outputs of a higher-order equation."""
  match hop:
    case _higher_order.Scan():
      consts, carry, slices = hop.split(input_labels)
    case _higher_order.While():
      _, consts, carry = hop.split(input_labels)
      slices = []
    case _higher_order.Cond(branches):
      outs = [
        propagate(x, input_labels[1:], is_final=is_final) for x in branches
      ]
      return functools.reduce(_join_labels, outs)
    case _:
      return propagate(hop.body, input_labels, is_final=is_final)
  body = lambda carry, is_final: propagate(
    hop.body, [*consts, *carry, *slices], is_final=is_final
  )
  return body(_iterate_to_fixpoint(body, carry), is_final)


def _iterate_to_fixpoint(body: _PropagateFn, carry: Sequence[int]) -> list[int]:
  """Return the labels that the carry of a loop has in any iteration."""
  carry = list(carry)
  # The loop ends: each round adds a label, and their number is finite.
  while (joined := _join_labels(carry, body(carry, False))) != carry:
    carry = joined
  return carry


def _join_labels(
  labels: Iterable[int], other_labels: Iterable[int]
) -> list[int]:
  """Return the union of the labels of each value of the first list.

  The second list may be longer: a scan returns stacked outputs after its carry.
  """
  return [a | b for a, b in zip(labels, other_labels, strict=False)]


def _is_inexact(aval: Any) -> bool:
  """Return whether a type has a float or complex dtype."""
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
