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


def noted(
  before: Statistics, arrays: Sequence[Any], limits: _limits.Limits
) -> Statistics:
  """The same after one more run.

  Args:
    before: what was noted before.
    arrays: the two operands and the result.
    limits: what half precision can hold.

  Returns:
    A :class:`Statistics`.
  """
  sizes = [jnp.abs(x) for x in arrays]
  lost = [_count((x > 0) & (x <= limits.zero)) for x in sizes]
  small = [_count((x > limits.zero) & (x < limits.normal)) for x in sizes]
  largest = [jnp.max(x, initial=0, where=~jnp.isnan(x)) for x in sizes]
  return Statistics(
    times=before.times + 1,
    largest=jnp.maximum(before.largest, jnp.max(jnp.stack(largest))),
    entries=before.entries + jnp.array([float(x.size) for x in sizes]),
    lost=before.lost + jnp.stack(lost),
    subnormal=before.subnormal + jnp.stack(small),
  )


def together(one: Statistics, other: Statistics) -> Statistics:
  """What was noted of two parts of a program."""
  added = jax.tree.map(jnp.add, one, other)
  return added._replace(largest=jnp.maximum(one.largest, other.largest))


def of_all_devices(one: Statistics, axes: tuple[Any, ...]) -> Statistics:
  """What was noted on all devices along the axes of a mesh."""
  added = jax.tree.map(lambda x: lax.psum(x, axes), one)
  return added._replace(largest=lax.pmax(one.largest, axes))


def _count(flags: Any) -> Any:
  return jnp.sum(flags, dtype=jnp.float32)
