"""Jaxprs: evaluate one equation, and which jaxprs an equation holds."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Equations that do nothing but call their jaxpr with all of their inputs.
_CALLS = {
  "checkpoint",
  "closed_call",
  "core_call",
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vjp_call_jaxpr",
  "jit",
  "pjit",
  "remat2",
}


def function(eqn: core.JaxprEqn) -> Callable[..., list[Any]]:
  """What an equation computes, as a function of its inputs."""

  def evaluate(*args: Any) -> list[Any]:
    # Each input is a variable of its own, even if one value is given twice.
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    alone = _EMPTY.replace(
      invars=inputs,
      outvars=eqn.outvars,
      eqns=[eqn.replace(invars=inputs)],
      effects=eqn.effects,
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*args)

  return evaluate


def called_jaxpr(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
  """The jaxpr that an equation calls with all of its inputs, if it does that.

  It is that of a ``jit``, a ``checkpoint``, or a function with a derivative of
  its own.
  """
  if eqn.primitive.name not in _CALLS:
    return None
  inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
  return inner if inner is None else closed(inner)


def closed(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
  """The jaxpr with its constants, of which an open one here has none."""
  if isinstance(jaxpr, core.ClosedJaxpr):
    return jaxpr
  return core.ClosedJaxpr(jaxpr, ())


def held_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
  """All jaxprs among the parameters of an equation."""
  for param in eqn.params.values():
    for value in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
        yield closed(value)


def manual_axes(eqn: core.JaxprEqn) -> frozenset[Any]:
  """The axes of the mesh along which a ``shard_map`` maps its function."""
  params: Any = eqn.params
  # The second is its name in JAX 0.8.
  return params.get("newly_manual_axes", params.get("manual_axes"))


def has_effect(eqn: core.JaxprEqn) -> bool:
  """Whether something happens beside the result: it must happen only once.

  A callback counts even if it says that it is pure.
  """
  # The effect of a sum over devices only says that it needs their axis.
  effects = {type(effect).__name__ for effect in eqn.effects}
  return (
    bool(effects - {"NamedAxisEffect"})
    or "callback" in eqn.primitive.name
    or any(runs_once(inner.jaxpr) for inner in held_jaxprs(eqn))
  )


def runs_once(jaxpr: core.Jaxpr) -> bool:
  """Whether an equation in a jaxpr has an effect."""
  return any(map(has_effect, jaxpr.eqns))


def needed_equations(
  jaxpr: core.Jaxpr, used: list[bool] | None = None
) -> list[tuple[core.JaxprEqn, list[Any]]]:
  """The equations that matter, and what is read for the last time by each.

  Args:
    jaxpr: the jaxpr.
    used: which of its outputs are used; all, if not given.

  Returns:
    A list, in their order, of the equations that have an effect or whose
    outputs are read, each with the variables that can be forgotten after it.
  """
  used = [True] * len(jaxpr.outvars) if used is None else used
  outputs = zip(jaxpr.outvars, used, strict=True)
  read = set(_variables([var for var, is_used in outputs if is_used]))
  needed = []
  for eqn in reversed(jaxpr.eqns):
    if not eqn.effects and not any(v in read for v in eqn.outvars):
      continue
    inputs = set(_variables(eqn.invars))
    unread = [v for v in eqn.outvars if v not in read]
    needed.append((eqn, [*(inputs - read), *unread]))
    read |= inputs
  return needed[::-1]


def _variables(atoms: list[Any]) -> Iterator[Any]:
  return (atom for atom in atoms if not isinstance(atom, core.Literal))


# Its fields can be replaced. What makes a jaxpr differs between versions.
_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr
