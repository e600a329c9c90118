"""Where a walk through jaxprs has come to: the line, and the way to it."""

from typing import NamedTuple

from jax.extend import core

from optax_lossscale._jaxprs._lines import Line, line_of


class Place(NamedTuple):
  """Where a walk through jaxprs has come to.

  Attributes:
    path: the names of the steps that led here.
    line: the user's line that led here, if one is known.
    backward: whether it is part of a backward pass.
  """

  path: tuple[str, ...] = ()
  line: Line | None = None
  backward: bool = False

  @property
  def source(self) -> str:
    """The user's line as a string; empty if none is known."""
    return str(self.line or "")

  def at(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Place":
    """The place of an equation in the jaxpr that the walk has come to."""
    # The name of a scope alone is all that JAX leaves of a transposition.
    is_backward = "transpose(" in str(eqn.source_info.name_stack)
    return Place(
      self.path,
      line_of(eqn, jaxpr) or self.line,
      self.backward or is_backward,
    )

  def step(self, name: str) -> "Place":
    """One step further."""
    return self._replace(path=(*self.path, name))
