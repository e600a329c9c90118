"""Statistics of the operands and results of a matmul, in float32."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale.diagnostics import _dtype_limits


class SiteStats(NamedTuple):
  """Statistics of all executions of one matmul site.

  Vectors of three have an entry for each operand and one for the result.

  Attributes:
    num_executions: the number of executions; float32[].
    amax: the largest magnitude in the operands and the result; float32[].
    num_entries: the numbers of entries; float32[3].
    num_underflows: the numbers of entries that become zero in half precision;
      float32[3].
    num_subnormals: the numbers of entries that become subnormal; float32[3].
  """

  num_executions: Any
  amax: Any
  num_entries: Any
  num_underflows: Any
  num_subnormals: Any


def make_empty_stats() -> SiteStats:
  """Return the statistics of a matmul that has not run."""
  scalar, vector = jnp.zeros((), jnp.float32), jnp.zeros(3, jnp.float32)
  return SiteStats(scalar, scalar, vector, vector, vector)


# Each matmul calls this function. It is jitted, so that JAX traces it once for
# each shape instead of once for each matmul.
@functools.partial(jax.jit, static_argnums=2)
def add_run(
  stats: SiteStats, arrays: Sequence[Any], limits: _dtype_limits.CastThresholds
) -> SiteStats:
  """Add the statistics of one more execution.

  Args:
    stats: the statistics so far.
    arrays: the two operands and the result.
    limits: the limits of half precision.

  Returns:
    A :class:`SiteStats`.
  """
  amaxes, num_underflows, num_subnormals = map(
    jnp.stack,
    zip(*(_measure_amax_and_underflow(x, limits) for x in arrays), strict=True),
  )
  num_entries = jnp.array([x.size for x in arrays], jnp.float32)
  return SiteStats(
    num_executions=stats.num_executions + 1,
    amax=jnp.maximum(stats.amax, jnp.max(amaxes)),
    num_entries=stats.num_entries + num_entries,
    num_underflows=stats.num_underflows + num_underflows,
    num_subnormals=stats.num_subnormals + num_subnormals,
  )


def _measure_amax_and_underflow(
  x: Any, limits: _dtype_limits.CastThresholds
) -> Any:
  """Return the largest magnitude, and the underflow and subnormal counts."""
  x = jnp.abs(x)
  nan_as_zero = jnp.where(jnp.isnan(x), 0, x)
  is_underflow = ((x > 0) & (x <= limits.underflow_threshold)).astype(jnp.int32)
  is_subnormal = (
    (x > limits.underflow_threshold) & (x < limits.smallest_normal)
  ).astype(jnp.int32)

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  def combine(lhs: Any, rhs: Any) -> Any:
    (a, b, c), (d, e, f) = lhs, rhs
    return lax.max(a, d), b + e, c + f

  identities = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  axes = tuple(range(x.ndim))
  amax, *counts = lax.reduce(
    (nan_as_zero, is_underflow, is_subnormal), identities, combine, axes
  )
  return amax, *(count.astype(jnp.float32) for count in counts)


def merge_devices(before: SiteStats, after: SiteStats) -> SiteStats:
  """Merge the statistics of the devices of a ``shard_map``.

  Args:
    before: the statistics with which each device began.
    after: the statistics of all devices, stacked.

  Returns:
    A :class:`SiteStats`.
  """
  sums = jax.tree.map(lambda x, y: x + jnp.sum(y - x, 0), before, after)
  return sums._replace(amax=jnp.max(after.amax, 0))
