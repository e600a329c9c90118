"""Which equations run in half precision, and where they may be hidden."""

from collections.abc import Callable
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs

# Functions marked with this scope keep their products in float32. The scope
# stays in the name stack of an equation, whatever transforms the function.
KEEP_FLOAT32 = "keep_float32"


def is_product(eqn: core.JaxprEqn) -> bool:
  """Whether this is a float32 product that may run in half precision."""
  if not _jaxprs.is_matrix_product(eqn):
    return False
  floats: list[Any] = [v.aval for v in (*eqn.invars[:2], *eqn.outvars)]
  are_float32 = all(aval.dtype == jnp.float32 for aval in floats)
  return are_float32 and _jaxprs.may_change_dtype(eqn) and not is_kept(eqn)


def is_kept(eqn: core.JaxprEqn) -> bool:
  """Whether the equation stands in a function marked to stay in float32."""
  return _jaxprs.has_scope(eqn, KEEP_FLOAT32)


def jaxprs_to_search(eqn: core.JaxprEqn) -> list[_jaxprs.ClosedJaxpr]:
  """The jaxprs that an equation holds or hides, unless it is marked."""
  held = list(_jaxprs.held_jaxprs(eqn))
  plain = None if held else _jaxprs.lowered(eqn)
  held += [] if plain is None else [plain]
  return [] if held and is_kept(eqn) else held


class Search(_jaxprs.Search):
  """Looks for products, once in each jaxpr.

  Attributes:
    hides: whether there are products in the derivative of an equation alone;
      None if nobody asks for that.
  """

  def __init__(
    self, hides: Callable[[core.JaxprEqn], bool] | None = None
  ) -> None:
    super().__init__(is_product, jaxprs_to_search)
    self.hides = hides
    self._hiding: dict[core.JaxprEqn, bool] = {}

  def inside_of(self, eqn: core.JaxprEqn) -> bool:
    """Whether there are products in what an equation holds.

    Or in its derivative, if there are no others.
    """
    inside = super().inside_of
    # A rule may need the axes of the mesh.
    if _jaxprs.where_it_runs(eqn, lambda: inside(eqn)):
      return True
    if self.hides is None or is_kept(eqn):
      return False  # Nothing is inside of what is marked.
    if eqn not in self._hiding:
      self._hiding[eqn] = self.hides(eqn)
    return self._hiding[eqn]
