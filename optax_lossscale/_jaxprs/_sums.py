"""How many terms a sum has."""

import math
from typing import Any

from jax.extend import core

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
