"""``DynamicLossScale``: grows the loss scale, and backs off on overflow."""

import dataclasses
from typing import Any, get_args, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._state import LossScaleState

HysteresisRefill = Literal["growth", "finite", "backoff"]


class DynamicPolicyState(NamedTuple):
  """The policy state of :class:`DynamicLossScale`, if it has hysteresis.

  Attributes:
    hysteresis_remaining: the number of overflows until one lowers the scale;
      int32, shape ``()``.

  Examples:
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale(hysteresis=2).init()
    >>> print(state.policy_state.hysteresis_remaining)
    2
  """

  hysteresis_remaining: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  """Grows the scale after many finite steps, and lowers it on overflow.

  On the ``growth_interval``-th finite step in a row the scale is multiplied by
  ``growth_factor``; a nonfinite step multiplies it by ``backoff_factor`` and
  restarts the count. The scale is clipped to [``min_scale``, ``max_scale``]. A
  growth that is clipped at ``max_scale`` restarts the count as well.

  A loss of thousands, such as a sum or an energy, needs a scale below 1. With
  the default ``min_scale``, every step may then be skipped without an error;
  :func:`loss_scale_metrics` and :func:`raise_if_stuck` detect this. Use
  ``min_scale=2.0**-14``, or :class:`HeadroomLossScale`, which finds the scale.

  Attributes:
    init_scale: the scale before the first step.
    growth_factor: the factor of a growth, greater than 1.
    backoff_factor: the factor of a backoff, between 0 and 1. Factors and scales
      that are not powers of two round each gradient; see
      :class:`FixedLossScale`.
    growth_interval: the number of finite steps in a row before the scale grows.
    min_scale: the lowest scale, at least 2**-126.
    max_scale: the highest scale, at most 2**126. The reciprocal of a larger
      scale is not a normal float32 number, and gradients would unscale to zero.
    hysteresis: the number of overflows before the scale decreases. The earlier
      overflows only skip the step and restart the count. Every further overflow
      lowers the scale again, until the hysteresis is refilled.
    hysteresis_refill: when the hysteresis is refilled: only on ``"growth"`` (as
      in Megatron and DeepSpeed), on every ``"finite"`` step as well (as in
      apex), or on every finite step and after each ``"backoff"`` (as in
      PaddlePaddle).

  Raises:
    TypeError: if a hyperparameter is not a number.
    ValueError: if one is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(init_scale=64.0, growth_interval=2)
    >>> state = policy.init()
    >>> for finite in [True, True, False, True]:
    ...   state = policy.adjust(state, jnp.array(finite))
    ...   print(state.loss_scale, state.finite_count, state.total_notfinite)
    64.0 1 0
    128.0 0 0
    64.0 0 1
    64.0 1 1

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018
  """

  init_scale: float = 2.0**15
  growth_factor: float = 2.0
  backoff_factor: float = 0.5
  growth_interval: int = 2000
  min_scale: float = 1.0
  max_scale: float = 2.0**126
  hysteresis: int = 1
  hysteresis_refill: HysteresisRefill = "growth"

  def __post_init__(self) -> None:
    _checks.check_scale_fields(self)
    _checks.check_number(
      "growth_factor",
      self.growth_factor,
      _checks.MIN_GROWTH_FACTOR,
      _checks.MAX_LOSS_SCALE,
    )
    _checks.check_number(
      "backoff_factor",
      self.backoff_factor,
      _checks.MIN_LOSS_SCALE,
      _checks.MAX_BACKOFF_FACTOR,
    )
    _checks.check_count("growth_interval", self.growth_interval)
    _checks.check_count("hysteresis", self.hysteresis)
    if self.hysteresis_refill not in get_args(HysteresisRefill):
      raise ValueError(
        "hysteresis_refill must be one of"
        f" {', '.join(map(repr, get_args(HysteresisRefill)))}, got"
        f" hysteresis_refill = {self.hysteresis_refill!r}."
      )
    _checks.convert_arrays_to_scalars(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    policy_state: Any = ()
    # A traced hysteresis, as from optax.inject_hyperparams, may be any number.
    is_traced = isinstance(self.hysteresis, jax.core.Tracer)
    if is_traced or self.hysteresis > 1:
      policy_state = DynamicPolicyState(
        _arrays.copy_as(self.hysteresis, jnp.int32)
      )
    return _state.make_initial_state(self.init_scale, policy_state)

  def adjust(
    self,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> LossScaleState:
    """Returns the state with the scale of the next step.

    Raises:
      ValueError: if the state belongs to another policy, or has no hysteresis
        and the policy has.
    """
    del grads_amax
    counted_state = _state.record_step(state, grads_finite)
    # Not `==`, since the count of a restored state may exceed the interval.
    grow = counted_state.finite_count >= _to_int32(self.growth_interval)
    backoff = ~counted_state.last_finite
    policy_state = state.policy_state
    if self._requires_hysteresis() or jax.tree.leaves(policy_state):
      (remaining,) = _state.get_policy_state(self, state, DynamicPolicyState)
      is_tolerated, remaining = self._apply_hysteresis(remaining, backoff, grow)
      backoff, policy_state = (
        backoff & ~is_tolerated,
        DynamicPolicyState(remaining),
      )
    factor = jnp.where(grow, _to_float32(self.growth_factor), jnp.float32(1))
    factor = jnp.where(backoff, _to_float32(self.backoff_factor), factor)
    scale = jnp.clip(
      state.loss_scale * factor,
      _to_float32(self.min_scale),
      _to_float32(self.max_scale),
    )
    return counted_state._replace(
      loss_scale=scale,
      finite_count=jnp.where(grow, jnp.int32(0), counted_state.finite_count),
      policy_state=policy_state,
    )

  def _requires_hysteresis(self) -> bool:
    # A traced hysteresis may have been 1 in `init`, so it requires no state.
    is_traced = isinstance(self.hysteresis, jax.core.Tracer)
    return not is_traced and self.hysteresis > 1

  def _apply_hysteresis(
    self, remaining: jax.Array, has_overflow: jax.Array, grow: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Return whether an overflow is tolerated, and the remaining hysteresis.

    Args:
      remaining: the remaining hysteresis before the step.
      has_overflow: whether the gradients of the step are not finite.
      grow: whether the scale grows after this step.
    """
    hysteresis = _to_int32(self.hysteresis)
    # A state from a policy with a larger hysteresis may have more remaining.
    remaining = jnp.minimum(remaining, hysteresis)
    remaining = jnp.where(
      has_overflow, jnp.maximum(remaining - 1, 0), remaining
    )
    # The result is used only after an overflow.
    is_tolerated = remaining > 0
    refill = grow
    if self.hysteresis_refill in ("finite", "backoff"):
      refill = ~has_overflow
    if self.hysteresis_refill == "backoff":
      refill = refill | ~is_tolerated
    return is_tolerated, jnp.where(refill, hysteresis, remaining)


def _to_float32(x: jax.typing.ArrayLike) -> jax.Array:
  return lax.convert_element_type(x, jnp.float32)


def _to_int32(x: jax.typing.ArrayLike) -> jax.Array:
  return lax.convert_element_type(x, jnp.int32)
