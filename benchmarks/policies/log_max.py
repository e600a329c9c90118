"""The log-normal rule of OpenSeq2Seq, in two forms, to be compared with.

Kuchaiev et al, Mixed-Precision Training for NLP and Speech Recognition with
OpenSeq2Seq, 2018, https://arxiv.org/abs/1805.10387
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import optax_lossscale as ols

LOG2_TOP = math.log2(65504)
DEVIATIONS = 3.09  # one step in a thousand overflows
MEAN_DECAY, SLOW_DECAY = 0.99, 0.999


class Averages(NamedTuple):
  """Sums with decaying weights, and the sums of these weights."""

  mean: jax.Array
  mean_weight: jax.Array
  slow_mean: jax.Array
  square: jax.Array  # in the mended form, the variance
  slow_weight: jax.Array


@dataclasses.dataclass(frozen=True)
class LogMax:
  """Base of both forms; the scale is 2**(top - (mean + 3.09 deviations))."""

  init_scale: float = 2.0**15

  def init(self):
    policy_state = Averages(*jnp.zeros((5,), jnp.float32))
    return (
      ols.FixedLossScale(self.init_scale)
      .init()
      ._replace(policy_state=policy_state)
    )


@dataclasses.dataclass(frozen=True)
class Published(LogMax):
  """As it is published.

  An overflow enters 65536 among the logarithms, and a zero its own.
  """

  def adjust(self, state, grads_finite, *, grads_amax=None):
    x = jnp.where(grads_finite, jnp.log2(grads_amax), 2.0**16)
    entry = Averages(x, 1.0, x, x * x, 1.0)
    decay = Averages(MEAN_DECAY, MEAN_DECAY, *[SLOW_DECAY] * 3)
    new = Averages(
      *(
        d * old + (1 - d) * e
        for d, old, e in zip(decay, state.policy_state, entry, strict=True)
      )
    )
    slow_mean = new.slow_mean / new.slow_weight
    variance = new.square / new.slow_weight - slow_mean**2
    deviation = jnp.sqrt(jnp.maximum(variance, 0))
    scale = 2 ** (16 - (new.mean / new.mean_weight + DEVIATIONS * deviation))
    return state._replace(
      loss_scale=jnp.clip(scale, 1, 2.0**126),
      last_finite=jnp.asarray(grads_finite),
      policy_state=new,
    )


@dataclasses.dataclass(frozen=True)
class Mended(LogMax):
  """The log-max rule with its faults fixed.

  An overflow is recorded as its lower bound: the logarithm is at least
  top - log2(scale). It at least halves the scale. A zero is not recorded, and
  doubles the scale. The averages are corrected for their bias to zero at the
  start, and the scale is rounded down to a power of two.
  """

  def adjust(self, state, grads_finite, *, grads_amax=None):
    policy_state, exponent = state.policy_state, jnp.log2(state.loss_scale)
    is_zero = grads_amax < 2.0**-126
    x = jnp.where(
      grads_finite,
      jnp.log2(jnp.where(is_zero, 1.0, grads_amax)),
      jnp.maximum(LOG2_TOP - exponent, policy_state.mean),
    )
    mean_weight = MEAN_DECAY * policy_state.mean_weight + (1 - MEAN_DECAY)
    slow_weight = SLOW_DECAY * policy_state.slow_weight + (1 - SLOW_DECAY)
    mean_rate = (1 - MEAN_DECAY) / mean_weight
    slow_rate = (1 - SLOW_DECAY) / slow_weight
    error = x - policy_state.slow_mean
    new = Averages(
      policy_state.mean + mean_rate * (x - policy_state.mean),
      mean_weight,
      policy_state.slow_mean + slow_rate * error,
      (1 - slow_rate) * (policy_state.square + slow_rate * error**2),
      slow_weight,
    )
    is_known = jnp.where(grads_finite, ~is_zero, policy_state.mean_weight > 0)
    new = jax.tree.map(
      lambda n, o: jnp.where(is_known, n, o), new, policy_state
    )
    best = jnp.floor(LOG2_TOP - (new.mean + DEVIATIONS * jnp.sqrt(new.square)))
    best = jnp.where(new.mean_weight > 0, best, 2.0**12)
    finite = jnp.where(is_zero, exponent + 1, best)
    overflow = jnp.minimum(best, exponent - 1)
    exponent = jnp.round(jnp.where(grads_finite, finite, overflow))
    return state._replace(
      loss_scale=jnp.exp2(jnp.clip(exponent, -24, 126)),
      last_finite=jnp.asarray(grads_finite),
      policy_state=new,
    )
