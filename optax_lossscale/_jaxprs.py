"""One equation of a jaxpr, evaluated by JAX itself."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def evaluate_equation(
  jaxpr: core.Jaxpr, eqn: core.JaxprEqn, read: Callable[[Any], Any]
) -> dict[Any, Any]:
  """Evaluates one equation.

  Args:
    jaxpr: the jaxpr in which the equation stands.
    eqn: the equation.
    read: gives the value of an input variable.

  Returns:
    The values by output variable.
  """
  inputs = [v for v in eqn.invars if not isinstance(v, core.Literal)]
  inputs = list(dict.fromkeys(inputs))
  # A jaxpr of this equation alone lets JAX do the evaluation.
  alone = jaxpr.replace(
    constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn]
  )
  fun = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))
  return dict(zip(eqn.outvars, fun(*map(read, inputs)), strict=True))


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


# Its fields can be replaced. What makes a jaxpr differs between versions.
_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr
