"""What it takes to run an equation once more, on arrays."""

from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from optax_lossscale._jaxprs._equations import Atom


def is_ref(kind: Any) -> bool:
  """Whether this is the type of a Ref, and not of an array."""
  return hasattr(kind, "inner_aval")


def as_array(x: Any, atom: Atom) -> Any:
  """The value of a variable or literal as an array, unless it is a Ref.

  Numbers that are written in a program may come in a class of JAX's own.
  """
  kind: Any = atom.aval
  is_one = is_ref(kind) or isinstance(x, jax.Array)
  return x if is_one else jnp.asarray(x, kind.dtype)


def without_donation(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The equation, which leaves its inputs to be read once more."""
  donated = eqn.params.get("donated_invars", ())
  if not any(donated):
    return eqn
  kept = (False,) * len(donated)
  return eqn.replace(params={**eqn.params, "donated_invars": kept})
