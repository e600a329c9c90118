"""What is noted of a product while it runs."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _limits

# The length of a sketch. The difference of two of them tells the norm of the
# difference of two arrays to some 2%. It is a prime, so that what repeats in an
# array does not repeat in the sketch.
_BUCKETS = 1021


class Statistics(NamedTuple):
  """What is noted of all runs of one product.

  Attributes:
    times: how often it ran; float32[].
    largest: the largest magnitude of its operands and its result; float32[].
    entries: how many entries the operands and the result had; float32[3].
    lost: how many of them become zero in half precision; float32[3].
    subnormal: how many become subnormal; float32[3].
    sketch: random sums of the entries of the result; float32[1021]. Charikar,
      Chen and Farach-Colton (2002), Finding frequent items in data streams.
  """

  times: Any
  largest: Any
  entries: Any
  lost: Any
  subnormal: Any
  sketch: Any


def empty() -> Statistics:
  """What is known of a product that has not run."""
  one, three = jnp.zeros(()), jnp.zeros(3)
  return Statistics(one, one, three, three, three, jnp.zeros(_BUCKETS))


def noted(
  before: Statistics,
  arrays: Sequence[Any],
  limits: _limits.Limits,
  seed: Any,
) -> Statistics:
  """The same after one more run.

  Args:
    before: what was noted before.
    arrays: the two operands and the result.
    limits: what half precision can hold.
    seed: an integer that is another one on each device.

  Returns:
    A :class:`Statistics`.
  """
  sizes = [jnp.abs(x) for x in arrays]
  lost = [_count((x > 0) & (x <= limits.zero)) for x in sizes]
  small = [_count((x > limits.zero) & (x < limits.normal)) for x in sizes]
  largest = [jnp.max(x, initial=0, where=~jnp.isnan(x)) for x in sizes]
  seed = before.times.astype(jnp.uint32) * jnp.uint32(97) + seed
  return Statistics(
    times=before.times + 1,
    largest=jnp.maximum(before.largest, jnp.max(jnp.stack(largest))),
    entries=before.entries + jnp.array([float(x.size) for x in sizes]),
    lost=before.lost + jnp.stack(lost),
    subnormal=before.subnormal + jnp.stack(small),
    sketch=before.sketch + _sketch(arrays[-1], seed),
  )


def together(one: Statistics, other: Statistics) -> Statistics:
  """What was noted of two parts of a program."""
  added = jax.tree.map(jnp.add, one, other)
  return added._replace(largest=jnp.maximum(one.largest, other.largest))


def of_all_devices(one: Statistics, axes: tuple[Any, ...]) -> Statistics:
  """What was noted on all devices along the axes of a mesh."""
  added = jax.tree.map(lambda x: lax.psum(x, axes), one)
  return added._replace(largest=lax.pmax(one.largest, axes))


def distance(one: Statistics, other: Statistics) -> float:
  """How far the results of two runs are apart, relative to the first."""
  a, b = np.float64(one.sketch), np.float64(other.sketch)
  with np.errstate(invalid="ignore"):  # What is not finite has no distance.
    return relative(float(np.linalg.norm(b - a)), float(np.linalg.norm(a)))


def relative(difference: float, norm: float) -> float:
  """A relative error; inf if there is no such number."""
  if not math.isfinite(difference):
    return math.inf
  if norm == 0:
    return 0.0 if difference == 0 else math.inf
  return difference / norm


def _count(flags: Any) -> Any:
  return jnp.sum(flags, dtype=jnp.float32)


def _sketch(x: Any, seed: Any) -> Any:
  flat = _whole(x).reshape(-1)
  # Each entry is added to a bucket, or subtracted, by chance.
  index = lax.iota(jnp.uint32, flat.size) ^ (seed * jnp.uint32(0x9E3779B9))
  bits = index * jnp.uint32(0x85EBCA6B)
  bits = (bits ^ (bits >> 15)) * jnp.uint32(0xC2B2AE35)
  signed = jnp.where(bits >> 31, -flat, flat)
  rows = -(-flat.size // _BUCKETS)
  padded = jnp.pad(signed, (0, rows * _BUCKETS - flat.size))
  return jnp.sum(padded.reshape(rows, _BUCKETS), axis=0)


def _whole(x: Any) -> Any:
  """The array, not sharded along an axis that types tell of."""
  mesh = jax.sharding.get_abstract_mesh()
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return x
  return jax.sharding.reshard(x, jax.sharding.PartitionSpec())
