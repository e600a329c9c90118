"""Cotangents that are known to be zero, and are not arrays of zeros."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
import jax.numpy as jnp
import numpy as np


def for_pull_back(cotangent: Any) -> Any:
  """A cotangent that a rule is given, as what ``jax.vjp`` returns takes it.

  An array of zeros would be as right, but whoever is given one must take it for
  numbers. So JAX 0.12 refuses it for an output that ``vmap`` does not map.
  """
  if not isinstance(cotangent, SymbolicZero):
    return cotangent
  if not _takes_zeros():
    return np.zeros(cotangent.shape, cotangent.dtype)
  return ad.Zero(cotangent.aval)


def zeros_of(variables: Sequence[Any]) -> list[Any]:
  """Arrays of zeros of the types of variables, also within ``shard_map``."""
  return [ad.zeros_like_aval(variable.aval) for variable in variables]


@functools.cache
def _takes_zeros() -> bool:
  """Whether what ``jax.vjp`` returns takes JAX's own zeros.

  JAX 0.8 does not, and they are not in its documented API.
  """
  x = jnp.zeros(())
  pull_back = lambda x: jax.vjp(jnp.sin, x)[1](ad.Zero(jax.typeof(x)))
  try:
    jax.eval_shape(pull_back, x)
  except Exception:
    return False
  return True
