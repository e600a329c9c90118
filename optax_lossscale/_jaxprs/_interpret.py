"""One way to interpret a jaxpr: what differs is what an equation does."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from optax_lossscale._jaxprs._equations import (
  Atom,
  ClosedJaxpr,
  needed_equations,
)

# What carries out an equation: it is given the values that this one reads, and
# returns those of its outputs.
Step = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]
# What makes a value of a number or an array that is written in the jaxpr, of
# its variable or literal, and of the equation that reads it, if one does.
Written = Callable[[Any, Atom, core.JaxprEqn | None], Any]


def interpret(
  closed: ClosedJaxpr,
  inputs: Sequence[Any],
  step: Step,
  *,
  written: Written = lambda value, atom, eqn: value,
  used: Sequence[bool] | None = None,
) -> list[Any]:
  """Carries out the equations of a jaxpr one by one.

  What leads to no output is left out, unless it has an effect. What is read for
  the last time is forgotten.

  Args:
    closed: the jaxpr.
    inputs: a value for each of its inputs: arrays, or whatever ``step`` takes.
    step: what carries out an equation.
    written: what makes a value of what is written in the jaxpr.
    used: which of its outputs are used; all, if not given.

  Returns:
    A value for each of its outputs; None for those that are not used.
  """
  jaxpr = closed.jaxpr
  env = dict(zip(jaxpr.invars, inputs, strict=True))
  for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
    env[var] = written(const, var, None)

  def read(atom: Atom, eqn: core.JaxprEqn | None = None) -> Any:
    if isinstance(atom, core.Literal):
      return written(atom.val, atom, eqn)
    return env[atom]

  used = [True] * len(jaxpr.outvars) if used is None else list(used)
  for eqn, last_read in needed_equations(jaxpr, used):
    outs = step(eqn, [read(atom, eqn) for atom in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))
    del outs
    for var in last_read:
      env.pop(var, None)
  outputs = zip(jaxpr.outvars, used, strict=True)
  return [read(atom) if is_used else None for atom, is_used in outputs]
