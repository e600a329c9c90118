"""A ``jit`` without options, which may be taken apart without a loss."""

from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_lossscale._jaxprs._equations import called_jaxpr, ClosedJaxpr


class PlainJit(NamedTuple):
  """A ``jit`` that was called here without any options, to compare others with.

  Attributes:
    eqn: its equation.
  """

  eqn: core.JaxprEqn

  def is_here(self, eqn: core.JaxprEqn) -> bool:
    """Whether an equation was traced with the settings that hold here.

    Such are the device and the mesh.
    """
    return eqn.ctx == self.eqn.ctx

  def entered(self, eqn: core.JaxprEqn) -> tuple[ClosedJaxpr, str] | None:
    """The jaxpr of another ``jit``, and the scope that its call stands for.

    None if it is no ``jit``, if it has options, such as shardings or donation,
    which would be lost, or if it is not understood.
    """
    if eqn.primitive is not self.eqn.primitive:
      return None
    try:
      inner = called_jaxpr(eqn)
      is_plain = self.is_here(eqn) and not self._has_options(eqn)
      call = f"jit({eqn.params['name']})"
      scope = str(eqn.source_info.name_stack.extend(call))
    except Exception:
      return None
    return (inner, scope) if inner and is_plain else None

  def _has_options(self, eqn: core.JaxprEqn) -> bool:
    """Whether a ``jit`` was given an option that this one was not given.

    This one has one argument and one result: what an option says of them, it
    may say of each argument and result of the other.
    """
    return any(
      option not in _one_for_each(self.eqn.params[name])
      for name, options in eqn.params.items()
      if name not in ("jaxpr", "name")
      for option in _one_for_each(options)
    )


def plain_jit() -> PlainJit:
  """A ``jit`` that is called here without any options."""
  (eqn,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).eqns
  return PlainJit(eqn)


def names_sharding(eqn: core.JaxprEqn) -> bool:
  """Whether an equation says how its result is placed on devices."""
  is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)
  return any(map(is_sharding, jax.tree.leaves(eqn.params)))


def _one_for_each(param: Any) -> tuple[Any, ...]:
  return param if isinstance(param, tuple) else (param,)
