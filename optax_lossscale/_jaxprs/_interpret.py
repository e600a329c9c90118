"""Runs equations: a jaxpr one by one, or one of them once more.

There is one way to interpret a jaxpr. What differs is what an equation does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs import _avals, _eqns

# What carries out an equation: it is given the values that this one reads, and
# returns those of its outputs.
EvalEqnFn = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]
# What makes a value of a number or an array that is written in the jaxpr, of
# its variable or literal, and of the equation that reads it, if one does.
LiftConstFn = Callable[[Any, _eqns.Atom, core.JaxprEqn | None], Any]


def interpret_jaxpr(
  closed_jaxpr: _eqns.ClosedJaxpr,
  inputs: Sequence[Any],
  eval_eqn: EvalEqnFn,
  *,
  lift_const: LiftConstFn = lambda value, atom, eqn: value,
  used_outputs: Sequence[bool] | None = None,
) -> list[Any]:
  """Carries out the equations of a jaxpr one by one.

  What leads to no output is left out, unless it has an effect. What is read for
  the last time is forgotten.

  Args:
    closed_jaxpr: the jaxpr.
    inputs: a value for each of its inputs: arrays, or whatever ``eval_eqn``
      takes.
    eval_eqn: what carries out an equation.
    lift_const: what makes a value of what is written in the jaxpr.
    used_outputs: which of its outputs are used; all, if not given.

  Returns:
    A value for each of its outputs; None for those that are not used.
  """
  jaxpr = closed_jaxpr.jaxpr
  env = dict(zip(jaxpr.invars, inputs, strict=True))
  for var, const in zip(jaxpr.constvars, closed_jaxpr.consts, strict=True):
    env[var] = lift_const(const, var, None)

  def read(atom: _eqns.Atom, eqn: core.JaxprEqn | None = None) -> Any:
    if isinstance(atom, core.Literal):
      return lift_const(atom.val, atom, eqn)
    return env[atom]

  used_outputs = (
    [True] * len(jaxpr.outvars) if used_outputs is None else list(used_outputs)
  )
  for eqn, dead_vars in _eqns.live_eqns(jaxpr, used_outputs):
    outs = eval_eqn(eqn, [read(atom, eqn) for atom in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))
    del outs
    for var in dead_vars:
      env.pop(var, None)
  outputs = zip(jaxpr.outvars, used_outputs, strict=True)
  return [read(atom) if is_used else None for atom, is_used in outputs]


def get_current_eqn_ctx() -> Any:
  """The settings that hold here, to compare those of equations with.

  Raises:
    Exception: if equations have none, or cannot be evaluated one by one.
  """
  (eqn,) = jax.make_jaxpr(lambda x: -x)(0.0).eqns
  jax.eval_shape(_eqns.eqn_as_fun(eqn), 0.0)
  return eqn.ctx


def can_substitute_result(eqn: core.JaxprEqn, ctx: Any) -> bool:
  """Whether another value may stand for the result of an equation.

  It may not on another device or mesh than that of this context. And it may not
  if the equation says how its result is placed, since XLA would choose a place
  for the other value.
  """
  is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)
  constrains_sharding = any(map(is_sharding, jax.tree.leaves(eqn.params)))
  return eqn.ctx == ctx and not constrains_sharding


def as_array(x: Any, atom: _eqns.Atom) -> Any:
  """The value of a variable or literal as an array, unless it is a Ref.

  Numbers that are written in a program may come in a class of JAX's own.
  """
  aval: Any = atom.aval
  is_array_or_ref = _avals.is_ref(aval) or isinstance(x, jax.Array)
  return x if is_array_or_ref else jnp.asarray(x, aval.dtype)


def disable_donation(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The equation, which leaves its inputs to be read once more."""
  donated_invars = eqn.params.get("donated_invars", ())
  if not any(donated_invars):
    return eqn
  no_donation = (False,) * len(donated_invars)
  return eqn.replace(params={**eqn.params, "donated_invars": no_donation})
