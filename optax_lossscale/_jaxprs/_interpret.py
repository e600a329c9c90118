"""Runs equations: a jaxpr one by one, or one of them once more.

There is one way to interpret a jaxpr. What differs is what an equation does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _equations, _types

# What carries out an equation: it is given the values that this one reads, and
# returns those of its outputs.
Evaluate = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]
# What makes a value of a number or an array that is written in the jaxpr, of
# its variable or literal, and of the equation that reads it, if one does.
Written = Callable[[Any, _equations.Atom, core.JaxprEqn | None], Any]


def interpret(
  closed: _equations.ClosedJaxpr,
  inputs: Sequence[Any],
  step: Evaluate,
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

  def read(atom: _equations.Atom, eqn: core.JaxprEqn | None = None) -> Any:
    if isinstance(atom, core.Literal):
      return written(atom.val, atom, eqn)
    return env[atom]

  used = [True] * len(jaxpr.outvars) if used is None else list(used)
  for eqn, last_read in _equations.live_eqns(jaxpr, used):
    outs = step(eqn, [read(atom, eqn) for atom in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))
    del outs
    for var in last_read:
      env.pop(var, None)
  outputs = zip(jaxpr.outvars, used, strict=True)
  return [read(atom) if is_used else None for atom, is_used in outputs]


def context_here() -> Any:
  """The settings that hold here, to compare those of equations with.

  Raises:
    Exception: if equations have none, or cannot be evaluated one by one.
  """
  (eqn,) = jax.make_jaxpr(lambda x: -x)(0.0).eqns
  jax.eval_shape(_equations.eqn_as_fun(eqn), 0.0)
  return eqn.ctx


def may_change_result(eqn: core.JaxprEqn, context: Any) -> bool:
  """Whether another value may stand for the result of an equation.

  It may not on another device or mesh than that of this context. And it may not
  if the equation says how its result is placed, since XLA would choose a place
  for the other value.
  """
  is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)
  says_where = any(map(is_sharding, jax.tree.leaves(eqn.params)))
  return eqn.ctx == context and not says_where


def as_array(x: Any, atom: _equations.Atom) -> Any:
  """The value of a variable or literal as an array, unless it is a Ref.

  Numbers that are written in a program may come in a class of JAX's own.
  """
  kind: Any = atom.aval
  is_one = _types.is_ref(kind) or isinstance(x, jax.Array)
  return x if is_one else jnp.asarray(x, kind.dtype)


def without_donation(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The equation, which leaves its inputs to be read once more."""
  donated = eqn.params.get("donated_invars", ())
  if not any(donated):
    return eqn
  kept = (False,) * len(donated)
  return eqn.replace(params={**eqn.params, "donated_invars": kept})
