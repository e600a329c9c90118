"""A policy that takes the largest gradients for log-normally distributed."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _adaptive, _exponents, _policies, _state
from optax_lossscale._state import LossScaleState

_SMALLEST_NORMAL = 2.0**-126


@dataclasses.dataclass(frozen=True)
class LogMaxLossScale:
  """Takes the largest gradients for log-normal, and overflow for a rare event.

  With m and s the mean and the standard deviation of the binary logarithm of
  the largest unscaled gradient, the scale is 2**(top - (m + deviations * s)),
  rounded down to a power of two; top is the logarithm of the largest number of
  ``dtype``. Mean and deviation are exponential averages, corrected for their
  start at nothing.

  Three things differ from the published rule. An overflow enters as what it
  says, that the logarithm is at least top - log2(scale); there the number 65536
  enters among logarithms, which pins the scale at 1 for thousands of steps. A
  maximum of zero leaves the averages alone, where its logarithm would poison
  them for ever; since it may have underflowed, the scale doubles. And an
  overflow halves the scale at least, as otherwise one could repeat itself for
  ever; before the first finite step it does nothing else.

  Attributes:
    init_scale: the scale before the first step; a power of two, as are the
      other two.
    dtype: the dtype of the backward pass.
    deviations: how many standard deviations to leave free; 3.09 lets one step
      in a thousand overflow.
    mean_decay: the decay of the average for the mean, in [0, 1).
    deviation_decay: the decay of the average for the deviation, in [0, 1).
    min_scale: the lowest scale, at least 2**-126.
    max_scale: the highest scale, at most 2**126.

  Raises:
    TypeError: if a hyperparameter is not a number, or ``dtype`` no float dtype.
    ValueError: if one is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.LogMaxLossScale()
    >>> state = policy.init()
    >>> for amax in [2.0**-8, 2.0**-7, 2.0**-8]:
    ...   state = policy.adjust(state, jnp.array(True), grads_amax=amax)
    ...   print(jnp.log2(state.loss_scale).round())
    23.0
    21.0
    22.0

  References:
    Kuchaiev et al, `Mixed-Precision Training for NLP and Speech Recognition
    with OpenSeq2Seq <https://arxiv.org/abs/1805.10387>`_, 2018
  """

  init_scale: float = 2.0**15
  dtype: Any = jnp.float16
  deviations: float = 3.09
  mean_decay: float = 0.99
  deviation_decay: float = 0.999
  min_scale: float = 2.0**-24
  max_scale: float = 2.0**126

  def __post_init__(self):
    _adaptive.check_scales(self)
    _adaptive.check_dtype(self.dtype)
    _state.check_number("deviations", self.deviations, 0, 64)
    for name in ("mean_decay", "deviation_decay"):
      # The float32 neighbour of 1: nearer to it nothing would ever be learned.
      _state.check_number(name, getattr(self, name), 0, 1 - 2**-24)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    names = (
      "log2_mean",
      "log2_mean_weight",
      "log2_slow_mean",
      "log2_variance",
      "log2_variance_weight",
    )
    memory = {name: jnp.zeros((), jnp.float32) for name in names}
    return _policies.initial_state(self.init_scale, memory)

  def adjust(
    self,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> LossScaleState:
    """Returns the state with the scale of the next step.

    Raises:
      TypeError: if ``grads_amax`` is not given.
    """
    amax = _adaptive.as_amax(self, grads_amax)
    _adaptive.check_memory(self, state)
    after = _policies.record_step(state, grads_finite)
    exponent = _exponents.floor_log2(state.loss_scale)
    # XLA takes subnormal numbers for zero, which has no logarithm.
    is_zero = amax < _SMALLEST_NORMAL
    is_known = ~is_zero & jnp.isfinite(amax)
    log2_amax = _exponents.log2(jnp.where(is_known, amax, jnp.float32(1)))
    at_least = self._top() - exponent.astype(jnp.float32)

    finite = after.last_finite
    memory = _state.select(
      jnp.where(finite, is_known, state.memory["log2_mean_weight"] > 0),
      self._average(state.memory, log2_amax, at_least, finite),
      state.memory,
    )
    best = self._best_exponent(memory)
    if_finite = jnp.where(is_known, best, exponent + is_zero.astype(jnp.int32))
    if_overflow = jnp.minimum(best, exponent - 1)
    new = jnp.where(finite, if_finite, if_overflow)
    return _adaptive.move(
      after._replace(memory=memory), _adaptive.bounded(self, new)
    )

  def _average(self, memory, log2_amax, at_least, finite):
    """The averages with one more logarithm in them."""
    mean, mean_weight = memory["log2_mean"], memory["log2_mean_weight"]
    # "At least 2" is no news where 5 is usual, and says nothing against it.
    x = jnp.where(finite, log2_amax, jnp.maximum(at_least, mean))
    mean_rate, mean_weight = _next_rate(self.mean_decay, mean_weight)
    rate, weight = _next_rate(
      self.deviation_decay, memory["log2_variance_weight"]
    )
    # The mean square minus the squared mean, but without the cancellation.
    error = x - memory["log2_slow_mean"]
    variance = memory["log2_variance"] + rate * jnp.square(error)
    return {
      "log2_mean": mean + mean_rate * (x - mean),
      "log2_mean_weight": mean_weight,
      "log2_slow_mean": memory["log2_slow_mean"] + rate * error,
      "log2_variance": (1 - rate) * variance,
      "log2_variance_weight": weight,
    }

  def _best_exponent(self, memory):
    deviations = _state.cast(self.deviations, jnp.float32)
    margin = deviations * jnp.sqrt(memory["log2_variance"])
    best = jnp.floor(self._top() - (memory["log2_mean"] + margin))
    # Beyond any scale, while nothing is known.
    is_known = memory["log2_mean_weight"] > 0
    return jnp.where(is_known, best, jnp.float32(2**12)).astype(jnp.int32)

  def _top(self):
    return jnp.float32(math.log2(_adaptive.top(self)))


def _next_rate(decay, weight):
  """What the next number of an exponential average counts, and its new weight.

  The weight is 1 minus the decay to the power of how many there are. With the
  plain rate divided by it the average is corrected for its start at nothing.
  """
  decay = _state.cast(decay, jnp.float32)
  weight = decay * weight + (1 - decay)
  return (1 - decay) / weight, weight
