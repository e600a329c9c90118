"""Asks rules for derivatives, of which a rule may refuse some."""

from collections.abc import Callable
from typing import TypeVar
import weakref

from jax.extend import core

from optax_lossscale import _jaxprs

# Those that have refused. They are not asked again for what they refuse, since
# JAX then forgets what it has traced of them.
_REFUSING: weakref.WeakSet[core.Jaxpr] = weakref.WeakSet()

T = TypeVar("T")


class Rule:
  """The rule of an equation, which is asked each time that it is called.

  JAX keeps one structure of the residuals for all calls of a function, and each
  may move other arguments. So the rule is asked for the derivatives of all
  floats, and XLA drops one that nobody reads. A rule that refuses is asked for
  those that move, which must then be the same in all calls.

  Args:
    eqn: the equation.
    called: the function that has the rule.
    floats: which inputs of the equation have derivatives.
  """

  def __init__(
    self, eqn: core.JaxprEqn, called: core.Jaxpr, floats: set[int]
  ) -> None:
    self._eqn = eqn
    self._called = called
    self._floats = floats
    self._first_moved: set[int] | None = None

  def ask(self, derive: Callable[[set[int]], T], moved: set[int]) -> T:
    """What a function of the chosen inputs returns.

    Args:
      derive: asks the rule for the derivatives of some inputs.
      moved: those that move in this call.

    Raises:
      NotImplementedError: if the rule refuses, and other inputs moved before.
    """
    if self._called not in _REFUSING:
      try:
        return derive(self._floats | moved)
      except Exception:  # A rule refuses in words of its own.
        if self._floats <= moved:
          raise
        _REFUSING.add(self._called)
    if self._first_moved is None:
      self._first_moved = moved
    if moved != self._first_moved:
      raise NotImplementedError(_cannot_share(self._eqn))
    try:
      return derive(moved)
    except Exception as error:
      # So JAX fails if it has traced the rule before the rule has refused.
      if type(error).__name__ != "StoreException":
        raise
      raise NotImplementedError(_cannot_share(self._eqn)) from error


def _cannot_share(eqn: core.JaxprEqn) -> str:
  return (
    f"autocast cannot run this {_jaxprs.name_of(eqn)} in half precision: its"
    " rule refuses some derivatives, and calls that share it through one jit or"
    " checkpoint differentiate different arguments, or were differentiated"
    " without autocast before. Mark it with optax_lossscale.keep_float32, or do"
    " not share it."
  )
