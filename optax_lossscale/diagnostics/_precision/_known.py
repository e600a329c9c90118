"""What is known of the variables of a jaxpr before anything is computed."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale import _jaxprs

_SUMS = {"reduce_sum", "reduce_window_sum", "reduce_prod"}
_CUMULATIVE = {"cumsum", "cumprod", "cumlogsumexp"}


class Known:
  """What is known of variables before anything is computed."""

  def __init__(self) -> None:
    self._numbers: dict[core.Var, float | None] = {}
    self._terms: dict[core.Var, int] = {}

  def number(self, atom: _jaxprs.Atom) -> float | None:
    """The number that all entries of a constant are, if it is one."""
    if isinstance(atom, core.Literal):
      return _as_number(atom.val)
    return self._numbers.get(atom)

  def terms(self, atom: _jaxprs.Atom) -> int:
    """How many terms a value is the sum of; 1 if it is none."""
    return 1 if isinstance(atom, core.Literal) else self._terms.get(atom, 1)

  def learn(self, eqn: core.JaxprEqn) -> None:
    """Remembers what follows of the result of an equation."""
    for var in eqn.outvars[:1]:
      self._terms[var] = terms_in_sum(eqn)
      if eqn.primitive.name in _jaxprs.SPREAD:
        self._numbers[var] = self.number(eqn.invars[0])

  def within(
    self, outer: Sequence[_jaxprs.Atom], inner: _jaxprs.ClosedJaxpr
  ) -> "Known":
    """What is known in a jaxpr, of which these are the first inputs."""
    known, jaxpr = Known(), inner.jaxpr
    for atom, var in zip(outer, jaxpr.invars, strict=False):
      known._numbers[var] = self.number(atom)
    for const, var in zip(inner.consts, jaxpr.constvars, strict=True):
      known._numbers[var] = _as_number(const)
    return known


def terms_in_sum(eqn: Any) -> int:
  """How many terms each result of an operation is the sum of."""
  name = eqn.primitive.name
  if name == "reduce_window_sum":
    return math.prod(eqn.params.get("window_dimensions", ()))
  axes = eqn.params.get("axes", ()) if name in _SUMS else ()
  if name in _CUMULATIVE and "axis" in eqn.params:
    axes = (eqn.params["axis"],)
  return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def _as_number(const: Any) -> float | None:
  """A real scalar as a number."""
  if isinstance(const, jax.core.Tracer):
    return None  # A solver closes over what was traced around it.
  is_real = jnp.issubdtype(jnp.result_type(const), jnp.floating)
  return float(const) if is_real and jnp.shape(const) == () else None
