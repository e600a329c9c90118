"""Where an equation stands in a program, by names that a user knows."""

import re
from typing import NamedTuple

from jax.extend import core

from optax_lossscale._jaxprs._lines import Line, line_of

# What JAX puts around the name of a scope that it transforms, and what it names
# the part of a checkpoint that runs again. Neither is of the user.
_TRANSFORMS = r"(?:jvp|transpose|vmap)\("
_AROUND = re.compile(_TRANSFORMS + r"([^()]*)\)")
_BEGINS_AGAIN = re.compile(rf"/(?={_TRANSFORMS})")
_OF_JAX = {"", "checkpoint", "rematted_computation"}


class Place(NamedTuple):
  """Where a walk through jaxprs has come to.

  Attributes:
    stack: the names of the scopes around it, as JAX writes them.
    line: the user's line that led here, if one is known.
    path: the names of the steps that led here.
  """

  stack: str = ""
  line: Line | None = None
  path: tuple[str, ...] = ()

  @property
  def scope(self) -> str:
    """The scopes around it, such as ``Net/block1``; often empty.

    It is the same forward and backward, and with and without ``vmap``.
    """
    scope = ""
    for part in _BEGINS_AGAIN.split(self.stack):
      names = [n for n in _untransformed(part).split("/") if n not in _OF_JAX]
      own = "/".join(names)
      # The backward pass of a checkpoint tells twice what is around it.
      if not scope or f"{own}/".startswith(f"{scope}/"):
        scope = own
      elif own:
        scope = f"{scope}/{own}"
    return scope

  @property
  def source(self) -> str:
    """The user's line as a string; empty if none is known."""
    return str(self.line or "")

  @property
  def backward(self) -> bool:
    """Whether it is part of a backward pass."""
    # The name of a scope alone is all that JAX leaves of a transposition.
    return "transpose(" in self.stack

  def at(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Place":
    """The place of an equation in the jaxpr that the walk has come to."""
    stack = "/".join(
      filter(None, [self.stack, str(eqn.source_info.name_stack)])
    )
    return self._replace(stack=stack, line=line_of(eqn, jaxpr) or self.line)

  def step(self, name: str) -> "Place":
    """One step further."""
    return self._replace(path=(*self.path, name))


def place_name(scope: str, source: str) -> str:
  """How reports name a place: ``Net/block1 at model.py:32 (Block)``."""
  return " at ".join(filter(None, [scope, source]))


def _untransformed(part: str) -> str:
  """The names without what JAX puts around them."""
  before = None
  while part != before:
    before, part = part, _AROUND.sub(r"\1", part)
  return part
