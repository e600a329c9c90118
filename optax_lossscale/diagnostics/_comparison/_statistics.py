"""What is noted of a product while it runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale.diagnostics import _limits


class Statistics(NamedTuple):
  """What is noted of all runs of one product.

  Attributes:
    times: how often it ran; float32[].
    largest: the largest magnitude of its operands and its result; float32[].
    entries: how many entries the operands and the result had; float32[3].
    lost: how many of them become zero in half precision; float32[3].
    subnormal: how many become subnormal; float32[3].
  """

  times: Any
  largest: Any
  entries: Any
  lost: Any
  subnormal: Any


def empty() -> Statistics:
  """What is known of a product that has not run."""
  one, three = jnp.zeros(()), jnp.zeros(3)
  return Statistics(one, one, three, three, three)


def of_one_run(arrays: Sequence[Any], limits: _limits.Limits) -> Statistics:
  """What is noted of one run of a product.

  Args:
    arrays: the two operands and the result.
    limits: what half precision can hold.

  Returns:
    A :class:`Statistics`.
  """
  largest, lost, subnormal = map(
    jnp.stack, zip(*(_sizes(x, limits) for x in arrays), strict=True)
  )
  entries = jnp.array([float(x.size) for x in arrays])
  return Statistics(jnp.float32(1), jnp.max(largest), entries, lost, subnormal)


def _sizes(x: Any, limits: _limits.Limits) -> Any:
  """The largest magnitude, and how many entries are lost and subnormal."""
  x = jnp.abs(x)
  known = jnp.where(jnp.isnan(x), 0, x)
  lost = ((x > 0) & (x <= limits.zero)).astype(jnp.int32)
  small = ((x > limits.zero) & (x < limits.normal)).astype(jnp.int32)

  # One pass for all three: XLA compiles a loop for each reduction.
  def both(one: Any, other: Any) -> Any:
    (a, b, c), (d, e, f) = one, other
    return lax.max(a, d), b + e, c + f

  zeros = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  axes = tuple(range(x.ndim))
  largest, *counts = lax.reduce((known, lost, small), zeros, both, axes)
  return largest, *(count.astype(jnp.float32) for count in counts)


def together(one: Statistics, other: Statistics) -> Statistics:
  """What was noted of some runs and of others."""
  return Statistics(
    times=one.times + other.times,
    largest=jnp.maximum(one.largest, other.largest),
    entries=one.entries + other.entries,
    lost=one.lost + other.lost,
    subnormal=one.subnormal + other.subnormal,
  )


def of_all_devices(one: Statistics, axes: tuple[Any, ...]) -> Statistics:
  """What was noted on all devices along the axes of a mesh."""
  added = jax.tree.map(lambda x: lax.psum(x, axes), one)
  return added._replace(largest=lax.pmax(one.largest, axes))
