"""How many numbers of each gradient a dtype would lose, at a loss scale."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _leaves, _limits


class Measured(NamedTuple):
  """What is read back of one leaf: two magnitudes, and then counts."""

  largest: Any
  smallest: Any  # inf if there is none
  zero: Any
  flushed: Any
  subnormal: Any
  overflow: Any
  nonfinite: Any


def measure(
  grads: Any, scale: float, limits: _limits.Limits
) -> list[tuple[str, Any, Measured]]:
  """The names of the leaves, the leaves, and what is read back of each."""
  return _leaves.measure_grads(
    grads,
    "gradient_report",
    lambda leaf: _measure(leaf, *_in_dtype_of(leaf, scale, limits)),
  )


def add_up(measured: list[Measured]) -> Measured:
  """All leaves together, in Python numbers, which do not overflow."""
  counts = [
    sum(int(getattr(found, name)) for found in measured)
    for name in Measured._fields[2:]
  ]
  return Measured(
    max((float(found.largest) for found in measured), default=0.0),
    min((float(found.smallest) for found in measured), default=math.inf),
    *counts,
  )


def _in_dtype_of(leaf: Any, scale: float, limits: _limits.Limits) -> np.ndarray:
  """The scale and the limits as the scalars that a leaf is compared with."""
  is_double = jnp.finfo(leaf.dtype).bits > 32
  with np.errstate(over="ignore"):  # A limit above float32's range is inf.
    return np.array((scale, *limits), np.float64 if is_double else np.float32)


@_leaves.reduce_on_device
def _measure(
  xp: Any, leaf: Any, scale: Any, zero: Any, normal: Any, inf: Any
) -> Measured:
  finite = xp.isfinite(leaf)
  size = _leaves.magnitude(xp, leaf)
  nonzero = finite & (size > 0)
  # Zeros in place of inf and NaN, so that numpy does not warn.
  scaled = xp.where(finite, size, 0) * scale
  count = lambda mask: _leaves.count(xp, mask)
  return Measured(
    largest=xp.max(size, initial=0, where=nonzero),
    smallest=xp.min(size, initial=xp.inf, where=nonzero),
    zero=count(size == 0),
    flushed=count(nonzero & (scaled <= zero)),
    subnormal=count((scaled > zero) & (scaled < normal)),
    overflow=count(scaled >= inf),
    nonfinite=count(~finite),
  )
