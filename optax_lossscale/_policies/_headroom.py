"""``HeadroomLossScale``: delayed scaling from the history of gradient maxima.

Scales are powers of two, and the policy computes with their exponents (int32),
because XLA's float log2 and exp2 are not exact. A binade is a factor of 2.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._policies import _log2_scales
from optax_lossscale._state import LossScaleState

# The binades by which the limit rises at most after a step with gradients, and
# falls after an overflow. The rise is bounded because gradients that underflow
# look smaller than they are.
_MAX_LOG2_CHANGE = 8
# In steps with gradients and without an overflow.
_RETRY_INTERVAL = 4096
# The failed scale rises by 1, 2, 4, 8, 8, ... binades.
_MAX_RETRY_DOUBLINGS = 4
# The usual initial scale of loss scalers is 2**15.
_DEFAULT_LOG2_SCALE = 15
# Means "no scale has failed"; higher than the exponent of every scale.
_NO_LIMIT = 128


class HeadroomPolicyState(NamedTuple):
  """The policy state of :class:`HeadroomLossScale`.

  Scales are stored as their binary logarithms.

  Attributes:
    max_log2_scale: the limit, learned from scales that worked and scales that
      overflowed; int32, shape ``()``.
    failed_log2_scale: the last scale that failed, or 128 if there is none, or
      if a scale as high has worked since; int32, shape ``()``.
    steps_since_overflow: the number of steps with gradients since the last
      overflow. It determines when the failed scale rises, and by how much;
      int32, shape ``()``.
    steps_without_grads: the number of steps in a row without gradients, because
      all were zero or some were not finite; int32, shape ``()``.
    search_delay: the number of steps without gradients after which a search
      begins; int32, shape ``()``.
    amax_history: the largest magnitude of each of the last steps with nonzero
      gradients, the newest first; float32, shape ``(amax_history_len,)``.
      Missing steps are 0.

  Examples:
    >>> import optax_lossscale as ols
    >>> state = ols.HeadroomLossScale(init_scale=64.0).init()
    >>> print(state.policy_state.max_log2_scale)
    6
  """

  max_log2_scale: jax.Array
  failed_log2_scale: jax.Array
  steps_since_overflow: jax.Array
  steps_without_grads: jax.Array
  search_delay: jax.Array
  amax_history: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Delayed scaling: a statistics-based scale that follows recent gradients.

  As in Transformer Engine, the scale of a step is computed from the largest
  gradients of the previous steps, ``margin`` binades below the largest number
  of ``dtype``. Unlike there, all gradients share one scale, and the policy also
  learns from overflows.

  The scale is a power of two, the lower of *target* and *limit*:

  1. The target puts the largest gradient of the last ``amax_history_len`` steps
     with nonzero gradients ``margin`` binades below the largest number of
     ``dtype``.
  2. The limit is halfway, in log2, between the last scale that worked and the
     last that failed (unless a scale as high has worked since), and at most 8
     binades above the former. Before the first nonzero gradients, a step of
     zeros raises the limit by 8 binades. Later, a step of zeros removes the
     limit while no scale has failed.
  3. An overflow lowers the limit to 8 binades below the current scale, but not
     so far that the largest gradient becomes subnormal. The first of several
     overflows in a row also records the current scale as failed, unless it is
     that low already or there were no nonzero gradients before.
  4. After 4,096 steps with gradients and without an overflow, the failed scale
     counts as one binade higher, so the policy tries it again. The next rises
     are 2, 4 and then always 8 binades. An overflow reverts the last rise.
  5. After 8 steps in a row whose gradients are zero or not finite, a search
     begins. One step in 4 tries a scale from the whole range, and another step
     tries the target. If only the search could represent the gradients, they
     replace the history and clear the failed scale. Otherwise they don't change
     the limit, but double the delay of 8 steps, up to 512; gradients in a row
     shorten it again. Overflows in these steps change nothing.

  The policy thus learns from recurring overflows, which then cost about one
  step in 4,096. Large gradients that are rarer than that may be skipped each
  time, and so may several large gradients in a row if most of the other steps
  are NaN.

  Gradients computed in float32 are recognized: if the largest gradient times
  the scale is finite but exceeds the largest number of ``dtype``, that gradient
  was not computed in ``dtype`` (for example, a scalar parameter in raw units
  next to a float16 network). It only shows that this scale did not overflow, so
  the policy records a surrogate instead, which asks for a scale 8 binades
  higher, or for 2**15 if that is higher. Then only overflows lower the scale.
  (With a ``margin`` below 4, the threshold is ``2**(4 - margin)`` times as
  large, since a sum over workers may exceed ``dtype``.) If the scale is so low
  that the scaled gradient fits in ``dtype``, it can't be recognized, and the
  target follows it.

  Intermediate values of the backward pass may be larger than the gradients. The
  policy learns about them only from overflows, unless
  :func:`~optax_lossscale.diagnostics.probe` reports them, which saves these
  steps.

  Attributes:
    init_scale: the scale before the first step. Like the other two scales, it
      must be a power of two.
    dtype: the dtype of the backward pass.
    margin: the number of binades between the largest gradient and the largest
      number of ``dtype``; an integer in [-64, 64]. It applies to the gradients
      that ``update`` receives. If these are sums over 1,024 workers, and the
      gradient of each worker is that much smaller, subtract 10. ``1`` keeps
      more of the smallest gradients, and skips more steps.
    amax_history_len: the number of steps in the history.
    min_scale: the lowest scale, at least 2**-126.
    max_scale: the highest scale, at most 2**126.

  Raises:
    TypeError: if a hyperparameter is not a number, or ``dtype`` no float dtype.
    ValueError: if one is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> policy = ols.HeadroomLossScale()
    >>> state = policy.init()
    >>> for amax in [2.0**-6, 2.0**-2, 0.0]:
    ...   state = policy.adjust(state, jnp.array(True), grads_amax=amax)
    ...   print(state.loss_scale, state.loss_scale * amax)
    131072.0 2048.0
    8192.0 2048.0
    8192.0 0.0
  """

  init_scale: float = 2.0**15
  dtype: Any = jnp.float16
  margin: int = 4
  amax_history_len: int = 8
  min_scale: float = 2.0**-24
  max_scale: float = 2.0**126

  def __post_init__(self) -> None:
    _checks.check_power_of_two_fields(self)
    # Normalize the dtype: policies with jnp.float16 and "float16" are equal.
    object.__setattr__(self, "dtype", _checks.as_float_dtype(self.dtype))
    _checks.check_number("margin", self.margin, -64, 64, integer=True)
    length = self.amax_history_len
    if isinstance(length, jax.core.Tracer):
      raise TypeError(
        "amax_history_len must be a Python integer, since it is the shape of an"
        f" array, got amax_history_len = {length!r}."
      )
    _checks.check_number("amax_history_len", length, 1, 2**20, integer=True)
    _checks.convert_arrays_to_scalars(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    policy_state = HeadroomPolicyState(
      max_log2_scale=_log2_scales.floor_log2(self.init_scale),
      failed_log2_scale=jnp.full((), _NO_LIMIT, jnp.int32),
      steps_since_overflow=jnp.zeros((), jnp.int32),
      steps_without_grads=jnp.zeros((), jnp.int32),
      search_delay=jnp.full((), _log2_scales.MIN_SEARCH_DELAY, jnp.int32),
      amax_history=jnp.zeros((int(self.amax_history_len),), jnp.float32),
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
      TypeError: if ``grads_amax`` is not given.
      ValueError: if the state belongs to another policy.
    """
    if grads_amax is None:
      raise TypeError(
        "HeadroomLossScale.adjust requires grads_amax, the largest magnitude"
        " among the unscaled gradients, got None. with_loss_scaling passes it;"
        " if you call adjust yourself, pass"
        " grads_amax=optax.tree.norm(grads, ord='inf')."
      )
    amax = jnp.abs(_arrays.cast(grads_amax, jnp.float32))
    policy_state = _state.get_policy_state(self, state, HeadroomPolicyState)
    state = state._replace(policy_state=policy_state)
    counted_state = _state.record_step(state, grads_finite)
    finite = counted_state.last_finite
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    amax = self._get_recorded_amax(state, amax)
    # All cases are computed, and the selects choose one, since `finite` and
    # `amax` are traced. Whether the current scale was a proposal of the search
    # is a function of the old state, so it is recomputed instead of stored.
    was_proposal, _ = self._propose_log2_scale(state.policy_state)
    state_after_overflow = _arrays.select(
      was_proposal, state.policy_state, self._update_after_overflow(state)
    )
    state_without_grads = _arrays.select(
      finite, self._update_after_zeros(state), state_after_overflow
    )._replace(
      steps_without_grads=optax.safe_increment(
        state.policy_state.steps_without_grads
      )
    )
    state_after_grads = self._update_after_grads(state, amax, was_proposal)
    policy_state = _arrays.select(
      has_grads, state_after_grads, state_without_grads
    )
    is_proposal, proposal = self._propose_log2_scale(policy_state)
    log2_scale = jnp.where(
      is_proposal, proposal, self._compute_tracked_log2_scale(policy_state)
    )
    scale = _log2_scales.exp2(log2_scale)
    is_unchanged = scale == state.loss_scale
    return counted_state._replace(
      loss_scale=scale,
      finite_count=jnp.where(is_unchanged, counted_state.finite_count, 0),
      policy_state=policy_state,
    )

  def _get_recorded_amax(
    self, state: LossScaleState, amax: jax.Array
  ) -> jax.Array:
    """Return the amax to record, or a surrogate if it was a float32 gradient.

    A gradient that exceeds the range of `dtype` when scaled was not computed in
    `dtype`. The surrogate asks for a scale that is 8 binades higher, and at
    least 2**15. Without that minimum, several overflows could lower the scale
    so far that the scaled gradient fits in `dtype` and is no longer recognized.
    """
    log2_scale = _log2_scales.floor_log2(state.loss_scale)
    # A margin below 4 means that the gradients are sums of half-precision
    # values, which may exceed the range of `dtype` by the difference.
    margin = _arrays.cast(self.margin, jnp.int32)
    sum_tolerance = _log2_scales.exp2(jnp.maximum(4 - margin, 0))
    can_be_half = (
      amax * state.loss_scale
      <= _log2_scales.get_largest(self.dtype) * sum_tolerance
    )
    _, top_exponent = math.frexp(_log2_scales.get_largest(self.dtype))
    surrogate_log2_amax = (
      top_exponent
      - 1
      - margin
      - jnp.maximum(log2_scale + _MAX_LOG2_CHANGE, _DEFAULT_LOG2_SCALE)
    )
    surrogate_amax = _log2_scales.exp2(jnp.clip(surrogate_log2_amax, -126, 127))
    return jnp.where(can_be_half, amax, surrogate_amax)

  def _update_after_grads(
    self, state: LossScaleState, amax: jax.Array, was_proposal: jax.Array
  ) -> HeadroomPolicyState:
    """Return the policy state after a finite step with gradients."""
    policy_state = state.policy_state
    log2_scale = _log2_scales.floor_log2(state.loss_scale)
    # The gradients would have been lost without the search if they overflow or
    # underflow at the scale that the policy would have used.
    scaled_amax = amax * _log2_scales.exp2(
      self._compute_tracked_log2_scale(policy_state)
    )
    is_search_only = was_proposal & (
      (scaled_amax > _log2_scales.get_largest(self.dtype))
      | (scaled_amax < _log2_scales.get_smallest(self.dtype))
    )
    older_history = jnp.where(is_search_only, 0, policy_state.amax_history[:-1])
    steps_since_overflow = optax.safe_increment(
      policy_state.steps_since_overflow
    )
    is_retry = steps_since_overflow % _RETRY_INTERVAL == 0
    retry_increment = jnp.where(
      is_retry, _compute_last_retry_increment(steps_since_overflow), 0
    )
    failed_log2_scale = jnp.minimum(
      policy_state.failed_log2_scale + retry_increment, _NO_LIMIT
    )
    # If the search was not needed for these gradients, its proposal changes
    # neither the limit nor the failed scale.
    updates_limit = is_search_only | ~was_proposal
    clears_failure = is_search_only | (
      updates_limit & (policy_state.failed_log2_scale <= log2_scale)
    )
    failed_log2_scale = jnp.where(clears_failure, _NO_LIMIT, failed_log2_scale)
    max_log2_scale = log2_scale + jnp.minimum(
      (failed_log2_scale - log2_scale) // 2, _MAX_LOG2_CHANGE
    )
    return HeadroomPolicyState(
      max_log2_scale=jnp.where(
        updates_limit, max_log2_scale, policy_state.max_log2_scale
      ),
      failed_log2_scale=failed_log2_scale,
      steps_since_overflow=steps_since_overflow,
      steps_without_grads=jnp.zeros((), jnp.int32),
      search_delay=_log2_scales.update_search_delay(
        policy_state.search_delay,
        policy_state.steps_without_grads,
        ~is_search_only,
      ),
      amax_history=jnp.concatenate([amax[None], older_history]),
    )

  def _update_after_zeros(self, state: LossScaleState) -> HeadroomPolicyState:
    """Return the policy state after a finite step without gradients."""
    policy_state = state.policy_state
    _, high = self._log2_scale_bounds()
    limit_without_history = jnp.minimum(
      policy_state.max_log2_scale + _MAX_LOG2_CHANGE, high
    )
    limit_with_history = jnp.where(
      policy_state.failed_log2_scale == _NO_LIMIT,
      high,
      policy_state.max_log2_scale,
    )
    has_history = jnp.max(policy_state.amax_history) > 0
    return policy_state._replace(
      max_log2_scale=jnp.where(
        has_history, limit_with_history, limit_without_history
      )
    )

  def _update_after_overflow(
    self, state: LossScaleState
  ) -> HeadroomPolicyState:
    """Return the policy state after an overflow at a scale not of a search."""
    policy_state = state.policy_state
    log2_scale = _log2_scales.floor_log2(state.loss_scale)
    has_history, _, min_useful_log2_scale = self._compute_log2_scales(
      policy_state.amax_history
    )
    # Revert the last rise of the failed scale: the scale before it had worked.
    failed_log2_scale = jnp.minimum(
      log2_scale,
      policy_state.failed_log2_scale
      - _compute_last_retry_increment(policy_state.steps_since_overflow),
    )
    failed_log2_scale = jnp.where(
      has_history & (log2_scale > min_useful_log2_scale),
      failed_log2_scale,
      _NO_LIMIT,
    )
    return policy_state._replace(
      max_log2_scale=jnp.maximum(
        log2_scale - _MAX_LOG2_CHANGE, min_useful_log2_scale
      ),
      # Only the first overflow in a row records a failed scale, so several NaN
      # steps in a row don't mark lower and lower scales as failed.
      failed_log2_scale=jnp.where(
        state.notfinite_count == 0,
        failed_log2_scale,
        policy_state.failed_log2_scale,
      ),
      steps_since_overflow=jnp.zeros((), jnp.int32),
    )

  def _propose_log2_scale(
    self, policy_state: HeadroomPolicyState
  ) -> tuple[jax.Array, jax.Array]:
    """Return whether a search chooses the next scale, and log2 of that scale.

    The second result is meaningless if the first is false.
    """
    has_history, target_log2_scale, _ = self._compute_log2_scales(
      policy_state.amax_history
    )
    init_log2_scale = _log2_scales.floor_log2(self.init_scale)
    return _log2_scales.propose_log2_scale(
      policy_state.steps_without_grads - policy_state.search_delay,
      policy_state.steps_since_overflow,
      jnp.where(has_history, target_log2_scale, init_log2_scale),
      self._log2_scale_bounds(),
    )

  def _compute_tracked_log2_scale(
    self, policy_state: HeadroomPolicyState
  ) -> jax.Array:
    """Return log2 of the scale outside a search: the lower of target and limit.

    The limit counts as the lowest useful scale if it is lower than that.
    """
    _, target_log2_scale, min_useful_log2_scale = self._compute_log2_scales(
      policy_state.amax_history
    )
    return jnp.minimum(
      jnp.maximum(policy_state.max_log2_scale, min_useful_log2_scale),
      target_log2_scale,
    )

  def _compute_log2_scales(
    self, amax_history: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether the history has maxima, the target and the lowest scale.

    The lowest useful scale makes the largest of the maxima the smallest normal
    number of ``dtype``. Both scales are within the bounds of the policy.
    """
    amax, bounds = jnp.max(amax_history), self._log2_scale_bounds()
    target_log2_scale, min_useful_log2_scale = _log2_scales.compute_log2_range(
      amax, self.dtype, self.margin, bounds
    )
    return amax > 0, target_log2_scale, min_useful_log2_scale

  def _log2_scale_bounds(self) -> tuple[jax.Array, jax.Array]:
    """Return log2 of the lowest and of the highest scale."""
    # Traced bounds may not be powers of two: round them inward.
    return (
      _log2_scales.ceil_log2(self.min_scale),
      _log2_scales.floor_log2(self.max_scale),
    )


def _compute_last_retry_increment(steps_since_overflow: jax.Array) -> jax.Array:
  """Return the binades by which the failed scale rose last; 0 if it did not."""
  return (
    1
    << jnp.minimum(
      steps_since_overflow // _RETRY_INTERVAL, _MAX_RETRY_DOUBLINGS
    )
  ) >> 1
