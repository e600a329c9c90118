"""The protocol of policies; the fixed and the dynamic scale."""

import dataclasses
from typing import (
  Any,
  get_args,
  Literal,
  NamedTuple,
  Protocol,
  runtime_checkable,
)

import jax
from jax import lax
import jax.numpy as jnp

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._state import LossScaleState

HysteresisRefill = Literal["growth", "finite", "backoff"]


@runtime_checkable
class LossScalePolicy(Protocol):
  """The protocol of a policy: two pure functions and no state of its own.

  A policy is an immutable object that holds hyperparameters only; everything
  that changes is in the :class:`LossScaleState` that it returns. Any object
  with these two methods can be given to
  :func:`~optax_lossscale.with_loss_scaling`.

  It may have the attributes ``min_scale`` and ``max_scale``, the lowest and the
  highest scale that it moves to. With them, :func:`loss_scale_metrics` and
  :func:`raise_if_stuck` tell when the scale cannot come down any further.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> class QuarterOnOverflow:
    ...   def init(self):
    ...     return ols.FixedLossScale(1024.0).init()
    ...   def adjust(self, state, grads_finite, *, grads_amax=None):
    ...     after = ols.FixedLossScale(1024.0).adjust(state, grads_finite)
    ...     factor = jnp.where(grads_finite, 1.0, 0.25)
    ...     return after._replace(loss_scale=state.loss_scale * factor)
    >>> policy = QuarterOnOverflow()
    >>> isinstance(policy, ols.LossScalePolicy)
    True
    >>> print(policy.adjust(policy.init(), jnp.array(False)).loss_scale)
    256.0
  """

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    ...

  def adjust(
    self,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> LossScaleState:
    """Returns the state after a step.

    Args:
      state: the state that scaled the loss of this step.
      grads_finite: whether all gradients were finite; bool, shape ``()``.
      grads_amax: the largest magnitude among the unscaled gradients; float32,
        shape ``()``. It means nothing if they were not finite. Under ``jit``
        it is not computed for a policy that does not use it.

    Returns:
      A state of the same structure, shapes and dtypes.
    """
    ...


def bounds(policy: LossScalePolicy | None) -> tuple[Any, Any]:
  """The lowest and the highest scale of a policy; None if it names none."""
  return getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)


def lowest_scale(policy: LossScalePolicy | None) -> Any:
  """The scale at which no overflow lowers it; None if the policy names none.

  Some rules stop above their `min_scale`, and say where.
  """
  return getattr(policy, "lowest_scale", bounds(policy)[0])


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
  """A loss scale that never moves.

  Steps with non-finite gradients are skipped all the same. Use
  ``FixedLossScale(1.0)`` to skip without scaling, in bfloat16 for example.

  Attributes:
    scale: what the loss is multiplied by, in [2**-126, 2**126]. A power of two
      changes no bit of a gradient that neither overflows nor underflows. Any
      other number rounds each gradient twice, once when the loss is scaled and
      once when the gradient is unscaled (a relative error of about 1e-7 in
      float32 gradients, and of 1e-3 in float16 gradients).

  Raises:
    TypeError: if ``scale`` is not a number.
    ValueError: if it is out of range.

  Examples:
    >>> import optax_lossscale as ols
    >>> print(ols.FixedLossScale(128.0).init().loss_scale)
    128.0
  """

  scale: float

  def __post_init__(self) -> None:
    _checks.check_scale("scale", self.scale)
    _checks.keep_numbers(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    return _state.initial_state(self.scale)

  def adjust(
    self,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> LossScaleState:
    """Returns the state with its counts after the step."""
    del grads_amax
    return _state.record_step(state, grads_finite)


@_state.readable_later
class DynamicPolicyState(NamedTuple):
  """The policy state of :class:`DynamicLossScale`, if it has hysteresis.

  Attributes:
    hysteresis_remaining: how many overflows until one lowers the scale; int32,
      shape ``()``.

  Examples:
    >>> import optax_lossscale as ols
    >>> state = ols.DynamicLossScale(hysteresis=2).init()
    >>> print(state.policy_state.hysteresis_remaining)
    2
  """

  hysteresis_remaining: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  """Raises the scale after a while without overflow, lowers it on overflow.

  On the ``growth_interval``-th finite step in a row the scale is multiplied by
  ``growth_factor``; a non-finite step multiplies it by ``backoff_factor`` and
  restarts the count. The scale stays within [``min_scale``, ``max_scale``];
  a growth held at ``max_scale`` restarts the count as well.

  A loss of thousands, such as a sum or an energy, needs a scale below 1. With
  the default ``min_scale`` each of its steps may be skipped, and no error says
  so: :func:`loss_scale_metrics` and :func:`raise_if_stuck` do. Use
  ``min_scale=2.0**-14``, or :class:`HeadroomLossScale`, which finds the scale.

  Attributes:
    init_scale: the scale before the first step.
    growth_factor: what a growth multiplies the scale by, greater than 1.
    backoff_factor: what a backoff multiplies the scale by, between 0 and 1.
      Factors and scales that are not powers of two work; they round each
      gradient as :class:`FixedLossScale` says.
    growth_interval: how many finite steps in a row make the scale grow.
    min_scale: the lowest scale, at least 2**-126.
    max_scale: the highest scale, at most 2**126: beyond it the reciprocal is
      no normal float32 number, and gradients would unscale to zero.
    hysteresis: how many overflows it takes to lower the scale. The ones before
      only skip the step and restart the count. Every further overflow lowers
      the scale again, until the hysteresis is refilled.
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
    _checks.check_scales(self)
    _checks.check_number(
      "growth_factor",
      self.growth_factor,
      _checks.SMALLEST_GROWTH,
      _checks.LARGEST_SCALE,
    )
    _checks.check_number(
      "backoff_factor",
      self.backoff_factor,
      _checks.SMALLEST_SCALE,
      _checks.LARGEST_BACKOFF,
    )
    _checks.check_count("growth_interval", self.growth_interval)
    _checks.check_count("hysteresis", self.hysteresis)
    if self.hysteresis_refill not in get_args(HysteresisRefill):
      raise ValueError(
        "hysteresis_refill must be one of"
        f" {', '.join(map(repr, get_args(HysteresisRefill)))}, got"
        f" hysteresis_refill = {self.hysteresis_refill!r}."
      )
    _checks.keep_numbers(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    policy_state: Any = ()
    if self._remembers():
      policy_state = DynamicPolicyState(_arrays.own(self.hysteresis, jnp.int32))
    return _state.initial_state(self.init_scale, policy_state)

  def adjust(
    self,
    state: LossScaleState,
    grads_finite: jax.typing.ArrayLike,
    *,
    grads_amax: jax.typing.ArrayLike | None = None,
  ) -> LossScaleState:
    """Returns the state with the scale of the next step.

    Raises:
      ValueError: if there is hysteresis, and the state is one of another policy
        or of one without.
    """
    del grads_amax
    after = _state.record_step(state, grads_finite)
    # `>=`, since the count of a restored state may be above the interval.
    grow = after.finite_count >= _i32(self.growth_interval)
    backoff = ~after.last_finite
    # If it is that of another policy, it is kept.
    policy_state = state.policy_state
    if self._remembers() and not self._started_without(policy_state):
      (left,) = _state.policy_state_of(self, state, DynamicPolicyState)
      tolerated, left = self._spend_hysteresis(left, backoff, grow)
      backoff, policy_state = backoff & ~tolerated, DynamicPolicyState(left)
    factor = jnp.where(grow, _f32(self.growth_factor), jnp.float32(1))
    factor = jnp.where(backoff, _f32(self.backoff_factor), factor)
    scale = jnp.clip(
      state.loss_scale * factor, _f32(self.min_scale), _f32(self.max_scale)
    )
    return after._replace(
      loss_scale=scale,
      finite_count=jnp.where(grow, jnp.int32(0), after.finite_count),
      policy_state=policy_state,
    )

  def _remembers(self) -> bool:
    # A traced hysteresis, such as one that Optax injects, may be any number.
    return isinstance(self.hysteresis, jax.core.Tracer) or self.hysteresis > 1

  def _started_without(self, policy_state: Any) -> bool:
    """Whether the hysteresis was 1 in ``init``, and is traced now."""
    return isinstance(self.hysteresis, jax.core.Tracer) and policy_state == ()

  def _spend_hysteresis(
    self, left: jax.Array, overflow: jax.Array, grow: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Whether this overflow is tolerated, and the hysteresis left after it."""
    full = _i32(self.hysteresis)
    # A state of another policy may have more left than this one allows.
    left = jnp.minimum(left, full)
    left = jnp.where(overflow, jnp.maximum(left - 1, 0), left)
    tolerated = left > 0
    refill = grow
    if self.hysteresis_refill in ("finite", "backoff"):
      refill = ~overflow
    if self.hysteresis_refill == "backoff":
      refill = refill | ~tolerated
    return tolerated, jnp.where(refill, full, left)


def _f32(x: jax.typing.ArrayLike) -> jax.Array:
  return lax.convert_element_type(x, jnp.float32)


def _i32(x: jax.typing.ArrayLike) -> jax.Array:
  return lax.convert_element_type(x, jnp.int32)
