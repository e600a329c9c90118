"""How many terms a sum has, and in which dtype it is added up."""

import math
from typing import Any

from jax import lax
from jax.extend import core
import jax.numpy as jnp

_SUMS = {"reduce_sum", "reduce_window_sum", "reduce_prod"}
_CUMULATIVE = {"cumsum", "cumprod", "cumlogsumexp"}


def terms_in_sum(eqn: core.JaxprEqn) -> int:
  """How many terms each result of an operation is the sum of; 1 if unknown."""
  name, params = eqn.primitive.name, eqn.params
  if name == "reduce_window_sum":
    window: Any = params.get("window_dimensions", ())
    return math.prod(window)
  axes: Any = params.get("axes", ()) if name in _SUMS else ()
  if name in _CUMULATIVE and "axis" in params:
    axes = (params["axis"],)
  kind: Any = eqn.invars[0].aval if axes else None
  return math.prod(kind.shape[axis] for axis in axes)


def accumulation_of(eqn: core.JaxprEqn) -> Any:
  """The dtype in which a product is asked to add up: that of its result."""
  kind: Any = eqn.outvars[0].aval
  asked: Any = eqn.params.get("preferred_element_type")
  return jnp.dtype(asked or kind.dtype)


def in_float32(eqn: core.JaxprEqn) -> core.JaxprEqn:
  """The product of float32 operands, as exact as a device has it."""
  # TPUs and some GPUs take float32 for a wish, unless it is the highest.
  highest = lax.Precision.HIGHEST, lax.Precision.HIGHEST
  wide = {"precision": highest, "preferred_element_type": jnp.dtype("float32")}
  return eqn.replace(params={**eqn.params, **wide})
