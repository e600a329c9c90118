"""Statistics of the arrays that a layer rounds, in float32."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale.diagnostics import _dtype_limits


class LayerStats(NamedTuple):
  """Statistics of the arrays that a layer rounds; float32[] each.

  The fractions are those of the array with the largest fraction.

  Attributes:
    amax: the largest finite magnitude.
    underflow_fraction: the fraction of entries that become zero.
    subnormal_fraction: the fraction of entries that become subnormal.
  """

  amax: Any
  underflow_fraction: Any
  subnormal_fraction: Any


def make_empty_stats() -> LayerStats:
  """Return the statistics of a layer that has not run."""
  return LayerStats(*[jnp.zeros((), jnp.float32)] * len(LayerStats._fields))


# Each operation that rounds calls this function. It is jitted, so that JAX
# traces it once for each shape instead of once for each operation.
@functools.partial(jax.jit, static_argnums=2)
def add_array(
  stats: LayerStats, x: Any, limits: _dtype_limits.CastThresholds
) -> LayerStats:
  """Add an array that is rounded.

  Args:
    stats: the statistics so far.
    x: the array, in float32.
    limits: the limits of its dtype.

  Returns:
    A :class:`LayerStats`.
  """
  magnitudes = jnp.abs(x)
  finite_magnitudes = jnp.where(jnp.isfinite(x), magnitudes, 0)
  underflows = (magnitudes > 0) & (magnitudes <= limits.underflow_threshold)
  subnormals = (magnitudes > limits.underflow_threshold) & (
    magnitudes < limits.smallest_normal
  )

  # Compute all three in one variadic reduction, since XLA would compile a loop
  # for each of three.
  def combine(lhs: Any, rhs: Any) -> Any:
    (a, b, c), (d, e, f) = lhs, rhs
    return lax.max(a, d), b + e, c + f

  operands = (
    finite_magnitudes,
    *(y.astype(jnp.int32) for y in (underflows, subnormals)),
  )
  identities = jnp.zeros((), x.dtype), jnp.int32(0), jnp.int32(0)
  amax, *counts = lax.reduce(
    operands, identities, combine, tuple(range(x.ndim))
  )
  fractions = [count.astype(jnp.float32) / max(x.size, 1) for count in counts]
  return jax.tree.map(jnp.maximum, stats, LayerStats(amax, *fractions))


def merge_devices(device_stats: LayerStats) -> LayerStats:
  """Merge the stacked statistics of the devices of a ``shard_map``."""
  return jax.tree.map(lambda x: jnp.max(x, 0), device_stats)
