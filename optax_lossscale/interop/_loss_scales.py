"""Policies with the rules of DeepSpeed and fairseq.

:class:`~optax_lossscale.DynamicLossScale` cannot express these rules.
"""

import dataclasses
import fractions
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _state

# The largest tolerance, and the largest integer in its fraction: with larger
# ones, the integers in _is_ratio_at_least would overflow an int32.
_MAX_FRACTION_TERM = 2**15


class DeepSpeedPolicyState(NamedTuple):
  """The policy state of :class:`DeepSpeedLossScale`.

  Attributes:
    hysteresis_remaining: how many overflows until one lowers the scale; int32.
    has_grown: whether the scale has grown since the start or the last overflow;
      bool.

  Examples:
    >>> from optax_lossscale import interop
    >>> print(interop.DeepSpeedLossScale().init().policy_state.has_grown)
    False
  """

  hysteresis_remaining: jax.typing.ArrayLike
  has_grown: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True)
class DeepSpeedLossScale:
  """DeepSpeed's rule since 0.17.1: growth after W+1 steps, then every W.

  Attributes:
    init_scale: the scale before the first step.
    growth_interval: W, the number of finite steps between growths. The first
      growth after the start or after an overflow takes one finite step more.
    min_scale: the lowest scale, at which DeepSpeed raises an error.
    hysteresis: the number of overflows after which the scale halves. Each
      further overflow halves it again, until the hysteresis is refilled.
    consecutive_hysteresis: whether each finite step refills the hysteresis. If
      False, only a growth does.

  Raises:
    TypeError: if a hyperparameter is not a number.
    ValueError: if one is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import interop
    >>> policy = interop.DeepSpeedLossScale(init_scale=8.0, growth_interval=2)
    >>> state = policy.init()
    >>> for _ in range(5):
    ...   state = policy.adjust(state, jnp.array(True))
    ...   print(state.loss_scale)
    8.0
    8.0
    16.0
    16.0
    32.0
  """

  init_scale: float = 2.0**16
  growth_interval: int = 1000
  min_scale: float = 1.0
  hysteresis: int = 2
  consecutive_hysteresis: bool = False
  max_scale: ClassVar[float] = _checks.MAX_LOSS_SCALE

  def __post_init__(self) -> None:
    _checks.check_scale_fields(self)
    _checks.check_count("growth_interval", self.growth_interval)
    _checks.check_count("hysteresis", self.hysteresis)
    if not isinstance(self.consecutive_hysteresis, bool):
      raise TypeError(
        "consecutive_hysteresis must be True or False, got"
        f" consecutive_hysteresis = {self.consecutive_hysteresis!r}."
      )
    _checks.convert_arrays_to_scalars(self)

  def init(self) -> _state.LossScaleState:
    """Returns the state before the first step."""
    remaining = _arrays.copy_as(self.hysteresis, jnp.int32)
    policy_state = DeepSpeedPolicyState(remaining, jnp.zeros((), jnp.bool_))
    return _state.make_initial_state(self.init_scale, policy_state)

  def adjust(
    self,
    state: _state.LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> _state.LossScaleState:
    """Returns the state with the scale of the next step."""
    del grads_amax
    remaining, has_grown = _state.get_policy_state(
      self, state, DeepSpeedPolicyState
    )
    new_state = _state.record_step(state, grads_finite)
    finite = new_state.last_finite
    interval = jnp.asarray(self.growth_interval, jnp.int32)
    # Subtract from the interval instead of adding to it, since it may be the
    # largest int32.
    grow = new_state.finite_count > interval - has_grown.astype(jnp.int32)
    backoff = ~finite & (remaining <= 1)
    remaining = jnp.where(finite | backoff, remaining, remaining - 1)
    refill = finite if self.consecutive_hysteresis else grow
    remaining = jnp.where(
      refill, jnp.asarray(self.hysteresis, jnp.int32), remaining
    )
    factor = jnp.where(grow, jnp.float32(2), jnp.float32(1))
    factor = jnp.where(backoff, jnp.float32(0.5), factor)
    low, high = jnp.float32(self.min_scale), jnp.float32(self.max_scale)
    return new_state._replace(
      loss_scale=jnp.clip(state.loss_scale * factor, low, high),
      finite_count=jnp.where(grow, jnp.int32(0), new_state.finite_count),
      policy_state=DeepSpeedPolicyState(remaining, finite & (has_grown | grow)),
    )


class FairseqPolicyState(NamedTuple):
  """The policy state of :class:`FairseqLossScale`.

  Attributes:
    steps_since_change: steps since the scale last moved; int32.
    overflows: overflows since the last backoff; int32.

  Examples:
    >>> from optax_lossscale import interop
    >>> print(interop.FairseqLossScale(256).init().policy_state.overflows)
    0
  """

  steps_since_change: jax.typing.ArrayLike
  overflows: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True)
class FairseqLossScale:
  """fairseq's rule: a backoff only if a large enough share of steps overflowed.

  The scale doubles on the `growth_interval`-th finite step in a row. An
  overflow halves it if the number of overflows since the last backoff, divided
  by the number of steps since the scale last changed, reaches `tolerance`.

  Attributes:
    growth_interval: the number of finite steps in a row after which the scale
      grows.
    init_scale: the scale before the first step.
    tolerance: the share of overflows that is tolerated, in [0, 32768]. It is
      rounded to the nearest fraction with a denominator up to 32768, which is
      exact for decimals of up to four digits. So the comparison is exact on
      every device.
    threshold: the lowest scale after a backoff; None if there is none.
    min_scale: the scale stays above this bound: a backoff to it or below is
      left out. fairseq raises an error instead. See `lowest_scale`.

  Raises:
    TypeError: if a hyperparameter is not a number.
    ValueError: if one is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import interop
    >>> policy = interop.FairseqLossScale(256, init_scale=8.0, tolerance=0.5)
    >>> state = policy.init()
    >>> for finite in [True, True, False, False]:
    ...   state = policy.adjust(state, jnp.array(finite))
    ...   print(state.loss_scale)
    8.0
    8.0
    8.0
    4.0
  """

  growth_interval: int
  init_scale: float = 2.0**7
  tolerance: float = 0.0
  threshold: float | None = None
  min_scale: float = 1e-4
  max_scale: ClassVar[float] = _checks.MAX_LOSS_SCALE

  def __post_init__(self) -> None:
    _checks.check_count("growth_interval", self.growth_interval)
    _checks.check_scale_fields(self)
    _checks.check_number("tolerance", self.tolerance, 0, _MAX_FRACTION_TERM)
    if self.threshold is not None:
      _checks.check_scale("threshold", self.threshold)
    _checks.convert_arrays_to_scalars(self)

  def init(self) -> _state.LossScaleState:
    """Returns the state before the first step."""
    zeros = FairseqPolicyState(
      jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )
    return _state.make_initial_state(self.init_scale, zeros)

  def adjust(
    self,
    state: _state.LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> _state.LossScaleState:
    """Returns the state with the scale of the next step."""
    del grads_amax
    steps_since_change, overflows = _state.get_policy_state(
      self, state, FairseqPolicyState
    )
    new_state = _state.record_step(state, grads_finite)
    overflow = ~new_state.last_finite
    steps_since_change = optax.safe_increment(steps_since_change)
    overflows = jnp.where(overflow, optax.safe_increment(overflows), overflows)
    backoff = overflow & _is_ratio_at_least(
      overflows, steps_since_change, self._tolerance_fraction()
    )
    grow = new_state.finite_count >= jnp.asarray(
      self.growth_interval, jnp.int32
    )
    zero = jnp.int32(0)
    steps_since_change = jnp.where(grow | backoff, zero, steps_since_change)
    overflows = jnp.where(backoff, zero, overflows)
    return new_state._replace(
      loss_scale=self._next_scale(state.loss_scale, grow, backoff),
      finite_count=jnp.where(grow, zero, new_state.finite_count),
      policy_state=FairseqPolicyState(steps_since_change, overflows),
    )

  @property
  def lowest_scale(self) -> float:
    """The scale at which, and below which, no backoff lowers the scale.

    It is the threshold if the threshold is above `min_scale`. Otherwise the
    lowest scale is between `min_scale` and twice `min_scale`, and this is the
    upper bound.
    """
    threshold = self.threshold or 0.0
    has_effect = threshold > self.min_scale
    return threshold if has_effect else 2 * self.min_scale

  def _next_scale(
    self, scale: jax.Array, grow: jax.Array, backoff: jax.Array
  ) -> jax.Array:
    """Return the next scale, with the threshold and the bounds applied."""
    higher = jnp.minimum(scale * 2, jnp.float32(self.max_scale))
    lower = scale * jnp.float32(0.5)
    if self.threshold is not None:
      lower = jnp.maximum(lower, jnp.float32(self.threshold))
    lower = jnp.where(lower > jnp.float32(self.min_scale), lower, scale)
    return jnp.where(grow, higher, jnp.where(backoff, lower, scale))

  def _tolerance_fraction(self) -> fractions.Fraction:
    """Return the tolerance as a fraction of small integers: 1/10 for 0.1."""
    tolerance = float(self.tolerance)
    # The numerator, which is the denominator times the tolerance, must be at
    # most _MAX_FRACTION_TERM, too.
    max_term = int(_MAX_FRACTION_TERM / max(tolerance, 1))
    return fractions.Fraction(tolerance).limit_denominator(max_term)


def _is_ratio_at_least(
  numerator: jax.Array, denominator: jax.Array, fraction: fractions.Fraction
) -> jax.Array:
  """Return whether numerator / denominator >= fraction, exactly, in int32."""
  if not fraction:
    return jnp.ones_like(numerator, jnp.bool_)
  # With fraction = p / q, the condition is numerator * q >= denominator * p,
  # whose terms may overflow. Divide by q: with denominator = quotient * q +
  # remainder, it is numerator >= quotient * p + remainder * p / q. The bound
  # ceil(remainder * p / q) is exact, since numerator is an integer, and
  # remainder * p fits, since both are at most _MAX_FRACTION_TERM. The last line
  # divides by p, since quotient * p may overflow.
  quotient, remainder = jnp.divmod(denominator, jnp.int32(fraction.denominator))
  remainder_bound = -(-remainder * fraction.numerator // fraction.denominator)
  return (numerator - remainder_bound) // fraction.numerator >= quotient
