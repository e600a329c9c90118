"""Dependence analysis: which labels does each value of a program depend on?

A label marks where data comes from, such as a loss scale. An output of an
equation has the labels of all its inputs, whatever the primitive computes.
Branches are joined, and loops are iterated to the fixpoint. Only floats carry
labels: a mask or an index that depends on a gradient is not a gradient. Control
dependence (the predicate of a branch or a loop) is ignored, too.

A set of labels is an int with a bit for each label.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import operator
from typing import Any, Protocol

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import (
  _equations,
  _higher_order,
  _outputs,
  _places,
  _walk,
)

# With several operands, each output depends on the operand at its position.
_OPERAND_BY_OPERAND = {
  "optimization_barrier", "pmax", "pmin", "psum", "psum_invariant",
}  # fmt: skip


class Labels(Protocol):
  """The rules of an analysis: what tags and equations do to labels."""

  def at_tag(
    self, eqn: core.JaxprEqn, name: str, labels: int, is_final: bool
  ) -> int:
    """Returns the labels of a tagged value.

    Args:
      eqn: the equation of the tag.
      name: the name that ``checkpoint_name`` gives to the value.
      labels: the labels of the value.
      is_final: whether these are all of its labels, and not those of an
        iteration before the fixpoint. True once for each time that the
        program contains the tag.
    """

  def at_output(self, aval: Any, labels: int, is_backward: bool) -> int:
    """Returns the labels of an output of an equation.

    Args:
      aval: the type of the output.
      labels: the labels of the inputs.
      is_backward: whether the equation is part of a backward pass.
    """


def labels_of_outputs(
  closed: _equations.ClosedJaxpr, inputs: Sequence[int], labels: Labels
) -> list[int]:
  """Propagates labels through a program.

  Args:
    closed: the jaxpr.
    inputs: the labels of each input.
    labels: the rules.

  Returns:
    The labels of each output.
  """
  return _Analysis(labels).run(closed, inputs, False, True)


class _Analysis:
  """Propagates labels, and remembers what it knows of each jaxpr."""

  def __init__(self, labels: Labels) -> None:
    self._labels = labels
    has_name = lambda eqn: _outputs.get_tag(eqn) is not None
    self._tags = _walk.EqnSearch(has_name, _equations.subjaxprs)
    self._call_of = functools.cache(_higher_order.parse_higher_order)
    self._known: dict[Any, list[int]] = {}

  def run(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: Sequence[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    if is_final and self._tags.any_in_jaxpr(closed.jaxpr):
      return self._run(closed, inputs, is_backward, True)
    key = closed.jaxpr, tuple(inputs), is_backward
    if key not in self._known:
      self._known[key] = self._run(closed, inputs, is_backward, False)
    return self._known[key]

  def _run(
    self,
    closed: _equations.ClosedJaxpr,
    inputs: Sequence[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    # Dead code counts, too: the tag of a value that nothing reads.
    env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    read = lambda atoms: [
      0 if isinstance(atom, core.Literal) else env.get(atom, 0)
      for atom in atoms
    ]
    for eqn in closed.jaxpr.eqns:
      outs = self._equation(eqn, read(eqn.invars), is_backward, is_final)
      env.update(zip(eqn.outvars, outs, strict=True))
    return read(closed.jaxpr.outvars)

  def _equation(
    self,
    eqn: core.JaxprEqn,
    inputs: list[int],
    is_backward: bool,
    is_final: bool,
  ) -> list[int]:
    is_backward = (
      is_backward or _places.EqnLocation().push_scope(eqn).is_backward
    )
    name = _outputs.get_tag(eqn)
    if name is not None:
      return [self._labels.at_tag(eqn, name, inputs[0], is_final)]
    call = self._call_of(eqn)
    if call is None:
      return self._transfer(eqn, inputs, is_backward)
    run = functools.partial(self.run, is_backward=is_backward)
    return _propagate_call(call, inputs, run, is_final)

  def _transfer(
    self, eqn: core.JaxprEqn, inputs: list[int], is_backward: bool
  ) -> list[int]:
    all_labels = functools.reduce(operator.or_, inputs, 0)
    labels = [all_labels] * len(eqn.outvars)
    if eqn.primitive.name in _OPERAND_BY_OPERAND:
      labels = inputs
    return [
      self._labels.at_output(var.aval, x, is_backward)
      if _is_inexact(var.aval)
      else 0
      for var, x in zip(eqn.outvars, labels, strict=True)
    ]


# Propagates labels through one jaxpr.
_Run = Callable[..., list[int]]


def _propagate_call(
  call: _higher_order.HigherOrderOp,
  inputs: list[int],
  run: _Run,
  is_final: bool,
) -> list[int]:
  """Returns the labels of what an equation calls, repeats or chooses."""
  match call:
    case _higher_order.Scan():
      consts, carry, slices = call.split(inputs)
      body = lambda carry, is_final: run(
        call.body, [*consts, *carry, *slices], is_final=is_final
      )
      return body(_fixpoint(body, carry), is_final)
    case _higher_order.While():
      _, consts, carry = call.split(inputs)
      body = lambda carry, is_final: run(
        call.body, [*consts, *carry], is_final=is_final
      )
      return body(_fixpoint(body, carry), is_final)
    case _higher_order.Cond(branches):
      outs = [run(x, inputs[1:], is_final=is_final) for x in branches]
      return functools.reduce(_join, outs)
    case _:
      return run(call.body, inputs, is_final=is_final)


def _fixpoint(body: _Run, carry: Sequence[int]) -> list[int]:
  """Returns the labels that the carry of a loop has in any iteration."""
  carry = list(carry)
  while True:
    joined = _join(carry, body(carry, False))
    if joined == carry:
      return carry
    carry = joined


def _join(labels: Iterable[int], others: Iterable[int]) -> list[int]:
  """Returns the union for each value; of as many as the first holds."""
  return [a | b for a, b in zip(labels, others, strict=False)]


def _is_inexact(aval: Any) -> bool:
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
