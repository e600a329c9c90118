"""With which settings equations are traced here: the device and the mesh."""

from typing import Any

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import function


def context_here() -> Any:
  """The settings that hold here, to compare those of equations with.

  Raises:
    Exception: if equations have none, or cannot be evaluated one by one.
  """
  (eqn,) = jax.make_jaxpr(lambda x: -x)(0.0).eqns
  jax.eval_shape(function(eqn), 0.0)
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
