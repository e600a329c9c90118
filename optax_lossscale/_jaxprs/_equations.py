"""Equations and the jaxprs that they hold: find, replace, evaluate."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Equations that do nothing but call their jaxpr with all of their inputs.
_CALLS = {
  "call",  # The first two end with JAX 0.10: remove once jax >= 0.11.
  "closed_call",
  "compute_on",
  "custom_jvp_call",
  "custom_vjp_call",
  "eval_jaxpr",
  "jit",
  "remat2",
  "xla_metadata_call",
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
  held = list(held_jaxprs(eqn))
  if len(held) != 1 or not fits(held[0], eqn):
    return None
  return held[0]


def fits(called: core.ClosedJaxpr, eqn: core.JaxprEqn) -> bool:
  """Whether a jaxpr has as many inputs and outputs as an equation."""
  inner = called.jaxpr
  return len(inner.invars) == len(eqn.invars) and (
    len(inner.outvars) == len(eqn.outvars)
  )


def closed(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
  """The jaxpr with its constants.

  Both are the same class since JAX 0.11, where a jaxpr has its constants with
  it. Remove this once jax >= 0.11.
  """
  if isinstance(jaxpr, core.ClosedJaxpr):
    return jaxpr
  return _with_constants_as_inputs(jaxpr)


def _with_constants_as_inputs(jaxpr: core.Jaxpr) -> core.ClosedJaxpr:
  inputs = [*jaxpr.constvars, *jaxpr.invars]
  without = jaxpr.replace(constvars=[], invars=inputs)
  return core.ClosedJaxpr(without if jaxpr.constvars else jaxpr, ())


def held_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
  """All jaxprs among the parameters of an equation."""
  for param in eqn.params.values():
    for value in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
        yield closed(value)


def hidden_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
  """The jaxprs that a primitive of hijax has with it."""
  primitive = eqn.params.get("_prim")
  for value in list(getattr(primitive, "__dict__", {}).values()):
    # What was traced by ``jax.jit`` has its jaxpr as an attribute.
    jaxpr = getattr(value, "jaxpr", value)
    if isinstance(jaxpr, (core.Jaxpr, core.ClosedJaxpr)):
      yield closed(jaxpr)


def with_jaxprs(
  eqn: core.JaxprEqn, replace: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
  """The same equation, with each jaxpr that it holds replaced.

  Args:
    eqn: the equation.
    replace: a function from a jaxpr to one of the same inputs and outputs. The
      constants of a jaxpr stay with it.

  Returns:
    The equation. All other parameters stay as they are, whatever they are.
  """
  params = {k: _replaced(v, replace) for k, v in eqn.params.items()}
  return eqn.replace(params=params)


def _replaced(param: Any, replace: Callable[[core.Jaxpr], core.Jaxpr]) -> Any:
  # The first is a closed one, too, since JAX 0.11, and keeps its constants.
  if isinstance(param, core.Jaxpr):
    return replace(param)
  if isinstance(param, core.ClosedJaxpr):
    return core.ClosedJaxpr(replace(param.jaxpr), param.consts)
  if isinstance(param, (tuple, list)):
    new = [_replaced(x, replace) for x in param]
    if all(a is b for a, b in zip(new, param, strict=True)):
      return param
    is_named = hasattr(param, "_fields")
    return type(param)(*new) if is_named else type(param)(new)
  return param


def has_effect(eqn: core.JaxprEqn) -> bool:
  """Whether something happens beside the result: it must happen only once.

  A callback counts even if it says that it is pure. What is written to a Ref
  that ends with the equation does not count.
  """
  # The effect of a sum over devices only says that it needs their axis.
  effects = {type(effect).__name__ for effect in eqn.effects}
  has_some = bool(effects - {"NamedAxisEffect"})
  return has_some or _takes_ref(eqn) or _calls_back(eqn)


def _takes_ref(eqn: core.JaxprEqn) -> bool:
  """Whether it could write to a Ref, even if it does not say so."""
  return any(hasattr(atom.aval, "inner_aval") for atom in eqn.invars)


def _calls_back(eqn: core.JaxprEqn) -> bool:
  held = [*held_jaxprs(eqn), *hidden_jaxprs(eqn)]
  return "callback" in eqn.primitive.name or any(
    _calls_back(inner) for closed in held for inner in closed.jaxpr.eqns
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
    acts = bool(eqn.effects) or _takes_ref(eqn)
    if not acts and not any(v in read for v in eqn.outvars):
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
