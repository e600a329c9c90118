"""The policy that follows the size of the gradients."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._policies import _powers_of_two, _search
from optax_lossscale._state import LossScaleState

# In binades. So far the scale rises at most, since gradients that underflowed
# look smaller than they are, and so far it falls.
_STRIDE = 8
_STEPS_TO_RETRY = 4096  # in steps with gradients
_RISES = 4  # The scale that failed rises by 1, 2, 4, 8, 8, and so on.
_USUAL = 15  # the exponent of the scale where most begin
_NOTHING = 128  # above the exponent of each scale


@_state.readable_later
class HeadroomPolicyState(NamedTuple):
  """The policy state of :class:`HeadroomLossScale`.

  Scales are told by their binary logarithms.

  Attributes:
    max_log2_scale: the scale that what held gradients and what overflowed
      allow; int32, shape ``()``.
    failed_log2_scale: the scale that failed last, or 128 if there is none, or
      if one as high has held gradients since; int32, shape ``()``.
    steps_since_overflow: steps with gradients since the last overflow, which
      tell when the scale that failed rises, and by how much; int32, shape
      ``()``. It is -1 before the first step.
    steps_without_grads: steps in a row that brought no gradients, since all
      were zero or some were not finite; int32, shape ``()``.
    search_delay: how many of these it takes until a search begins; int32, shape
      ``()``.
    amax_history: the largest magnitude of each of the last steps that had
      gradients other than zero, the newest first; float32, shape
      ``(amax_history_len,)``.
      Zeros where there was no such step yet.

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
  """Delayed scaling: keeps the largest recent gradient some binades below inf.

  As in Transformer Engine, the scale of a step follows from the largest
  gradients of the steps before, ``margin`` binades below the largest number of
  ``dtype``. But it is one scale for all gradients, and it learns from
  overflows.

  The scale is a power of two, the lower of *evidence* and *limit*:

  1. The evidence brings the largest gradient of the last ``amax_history_len``
     steps that had any ``margin`` binades below the top of ``dtype``.
  2. The limit is halfway between the last scale that held gradients and the
     last that failed, unless one as high has held some since, and at most 8
     binades above the former; a step of zeros raises it by 8 before any
     gradients, and lifts it while nothing has failed.
  3. An overflow lowers it to 8 binades under its scale, but never to where the
     largest gradient would be subnormal; the first of a row of overflows says
     which scale failed, or that none did, if it was as low as that or if there
     were no gradients before.
  4. After 4,096 steps with gradients and without an overflow, the scale that
     failed counts as one binade higher, so that it is tried again; after 4,096
     more as two higher than that, then four, then eight each time; an overflow
     takes back the last of these.
  5. After 8 steps in a row without gradients, zeros or overflows, a search
     begins: one step in 4 tries a scale out of the whole range, and one that of
     the evidence; gradients that only these could see are the only evidence,
     and nothing has failed for them; others teach nothing of the limit, as
     overflows do there, and double the 8, up to 512, until gradients in a row
     bring it down again.

  So what overflows is learned, and then lost about once in 4,096 steps. What
  comes less often than that may be lost each time, and so may rows of large
  gradients where most of the other steps are NaN.

  A gradient is evidence if it may have been in ``dtype``. One that is finite
  although it is, times the scale, above the top was never there, such as that
  of a scalar in raw units beside a float16 network. It shows only that this
  scale held: it is remembered as one that asks for 8 binades more, or for
  2**15 if that is higher, so that only overflows teach the policy then. (With a
  ``margin`` below 4, 2 to the difference times above the top, since a sum may
  be.) At a scale so low that it fits below the top, it cannot be told
  from others, and is followed.

  Values on the way to the gradients may be larger than these, and only
  overflows teach the policy of them.
  :func:`~optax_lossscale.diagnostics.probe` shows them to it, so that these
  steps are not lost.

  Attributes:
    init_scale: the scale before the first step; a power of two, as are the
      other two.
    dtype: the dtype of the backward pass, whose largest number is the top.
    margin: how many binades to keep the largest gradient below the top; an
      integer in [-64, 64]. What counts is the gradients that ``update`` is
      given. If they are sums over 1,024 workers, and the gradient of each
      worker is that much smaller, subtract 10. ``1`` keeps more of the smallest
      gradients, and loses more steps.
    amax_history_len: how many maxima to remember.
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
    _checks.check_powers_of_two(self)
    # One of the ways to write a dtype, so that equal policies are equal.
    object.__setattr__(self, "dtype", _checks.as_float_dtype(self.dtype))
    _checks.check_number("margin", self.margin, -64, 64, integer=True)
    length = self.amax_history_len
    if isinstance(length, jax.core.Tracer):
      raise TypeError(
        "amax_history_len must be a Python integer, since it is the shape of an"
        f" array, got amax_history_len = {length!r}."
      )
    _checks.check_number("amax_history_len", length, 1, 2**20, integer=True)
    _checks.keep_numbers(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    policy_state = HeadroomPolicyState(
      max_log2_scale=_powers_of_two.floor_log2(self.init_scale),
      failed_log2_scale=jnp.full((), _NOTHING, jnp.int32),
      steps_since_overflow=jnp.full((), -1, jnp.int32),
      steps_without_grads=jnp.zeros((), jnp.int32),
      search_delay=jnp.full((), _search.SHORTEST_WAIT, jnp.int32),
      amax_history=jnp.zeros((int(self.amax_history_len),), jnp.float32),
    )
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
      TypeError: if ``grads_amax`` is not given.
      ValueError: if the state is one of another policy.
    """
    if grads_amax is None:
      raise TypeError(
        "HeadroomLossScale.adjust requires grads_amax, the largest magnitude"
        " among the unscaled gradients, got None. with_loss_scaling passes it;"
        " if you call adjust yourself, pass"
        " grads_amax=optax.tree.norm(grads, ord='inf')."
      )
    amax = jnp.abs(_arrays.cast(grads_amax, jnp.float32))
    policy_state = _state.policy_state_of(self, state, HeadroomPolicyState)
    state = state._replace(policy_state=self._begun(policy_state))
    after = _state.record_step(state, grads_finite)
    finite = after.last_finite
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    amax = self._as_evidence(state, amax)
    was_guess, _ = self._guess(state.policy_state)
    zeros, overflow = self._after_zeros(state), self._after_overflow(state)
    overflow = _arrays.select(was_guess, state.policy_state, overflow)
    quiet = _arrays.select(finite, zeros, overflow)._replace(
      steps_without_grads=optax.safe_increment(
        state.policy_state.steps_without_grads
      )
    )
    grads = self._after_grads(state, amax, was_guess)
    policy_state = _arrays.select(has_grads, grads, quiet)
    is_guess, guess = self._guess(policy_state)
    exponent = jnp.where(is_guess, guess, self._usual(policy_state))
    scale = _powers_of_two.power_of_two(exponent)
    moved = scale != state.loss_scale
    return after._replace(
      loss_scale=scale,
      finite_count=jnp.where(moved, jnp.int32(0), after.finite_count),
      policy_state=policy_state,
    )

  def _begun(self, policy_state: HeadroomPolicyState) -> HeadroomPolicyState:
    """The policy state, which before the first step is that of `init`.

    What fills the fields that a checkpoint of another version lacks with those
    of a fresh state, as Flax' checkpoints do, mixes the two.
    """
    zeros = jnp.zeros_like(policy_state.amax_history)
    first = self.init().policy_state._replace(amax_history=zeros)
    begun = _arrays.select(
      policy_state.steps_since_overflow < 0, first, policy_state
    )
    return begun._replace(
      steps_since_overflow=jnp.maximum(policy_state.steps_since_overflow, 0)
    )

  def _as_evidence(self, state: LossScaleState, amax: jax.Array) -> jax.Array:
    """What to remember of a finite step for its largest gradient.

    This itself, if it may have been in half precision. If it was not, it says
    only that this scale held: what asks for one that is higher by a stride, or
    for a usual one, so that rows of overflows do not lead to where it could be
    taken for half.
    """
    held = _powers_of_two.floor_log2(state.loss_scale)
    # Below 4, the margin allows for the sum of so many numbers in half.
    margin = _arrays.cast(self.margin, jnp.int32)
    summands = _powers_of_two.power_of_two(jnp.maximum(4 - margin, 0))
    may_be_half = amax * state.loss_scale <= self._top() * summands
    _, top_exponent = math.frexp(self._top())
    exponent = top_exponent - 1 - margin - jnp.maximum(held + _STRIDE, _USUAL)
    asks_for_it = _powers_of_two.power_of_two(jnp.clip(exponent, -126, 127))
    return jnp.where(may_be_half, amax, asks_for_it)

  def _after_grads(
    self, state: LossScaleState, amax: jax.Array, was_guess: jax.Array
  ) -> HeadroomPolicyState:
    """The policy state after a finite step that had gradients."""
    policy_state = state.policy_state
    held = _powers_of_two.floor_log2(state.loss_scale)
    usual = amax * _powers_of_two.power_of_two(self._usual(policy_state))
    is_new = was_guess & ((usual > self._top()) | (usual < self._bottom()))
    older = jnp.where(is_new, 0, policy_state.amax_history[:-1])
    steps_since_overflow = optax.safe_increment(
      policy_state.steps_since_overflow
    )
    is_due = steps_since_overflow % _STEPS_TO_RETRY == 0
    rise = jnp.where(is_due, _last_rise(steps_since_overflow), 0)
    failed_log2_scale = jnp.minimum(
      policy_state.failed_log2_scale + rise, _NOTHING
    )
    teaches = is_new | ~was_guess
    is_over = is_new | (teaches & (policy_state.failed_log2_scale <= held))
    failed_log2_scale = jnp.where(is_over, _NOTHING, failed_log2_scale)
    max_log2_scale = held + jnp.minimum(
      (failed_log2_scale - held) // 2, _STRIDE
    )
    return HeadroomPolicyState(
      max_log2_scale=jnp.where(
        teaches, max_log2_scale, policy_state.max_log2_scale
      ),
      failed_log2_scale=failed_log2_scale,
      steps_since_overflow=steps_since_overflow,
      steps_without_grads=jnp.zeros((), jnp.int32),
      search_delay=_search.search_delay_after(
        policy_state.search_delay, policy_state.steps_without_grads, ~is_new
      ),
      amax_history=jnp.concatenate([amax[None], older]),
    )

  def _after_zeros(self, state: LossScaleState) -> HeadroomPolicyState:
    """The policy state after a finite step without gradients."""
    policy_state = state.policy_state
    _, high = self._bounds()
    raised = jnp.minimum(policy_state.max_log2_scale + _STRIDE, high)
    lifted = jnp.where(
      policy_state.failed_log2_scale == _NOTHING,
      high,
      policy_state.max_log2_scale,
    )
    has_evidence = jnp.max(policy_state.amax_history) > 0
    return policy_state._replace(
      max_log2_scale=jnp.where(has_evidence, lifted, raised)
    )

  def _after_overflow(self, state: LossScaleState) -> HeadroomPolicyState:
    """The policy state after a step that was no guess, and not finite."""
    policy_state = state.policy_state
    failed = _powers_of_two.floor_log2(state.loss_scale)
    has_evidence, _, lowest = self._evidence(policy_state.amax_history)
    # What the last rise tried is taken back: the scale before it had held.
    failed_log2_scale = jnp.minimum(
      failed,
      policy_state.failed_log2_scale
      - _last_rise(policy_state.steps_since_overflow),
    )
    failed_log2_scale = jnp.where(
      has_evidence & (failed > lowest), failed_log2_scale, _NOTHING
    )
    return policy_state._replace(
      max_log2_scale=jnp.maximum(failed - _STRIDE, lowest),
      failed_log2_scale=jnp.where(
        state.notfinite_count == 0,
        failed_log2_scale,
        policy_state.failed_log2_scale,
      ),
      steps_since_overflow=jnp.zeros((), jnp.int32),
    )

  def _guess(
    self, policy_state: HeadroomPolicyState
  ) -> tuple[jax.Array, jax.Array]:
    """Whether the next step is a guess, and the exponent of its scale."""
    has_evidence, evidence, _ = self._evidence(policy_state.amax_history)
    first = _powers_of_two.floor_log2(self.init_scale)
    best = jnp.where(has_evidence, evidence, first)
    step = policy_state.steps_without_grads - policy_state.search_delay
    return _search.next_guess(
      step, policy_state.steps_since_overflow, best, self._bounds()
    )

  def _usual(self, policy_state: HeadroomPolicyState) -> jax.Array:
    """The exponent of the next scale, if it is no guess."""
    _, evidence, lowest = self._evidence(policy_state.amax_history)
    return jnp.minimum(
      jnp.maximum(policy_state.max_log2_scale, lowest), evidence
    )

  def _evidence(
    self, amax_history: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether there are maxima, and the exponents of two scales for them.

    The first scale is the one that they ask for, the second the lowest: there
    the largest of them is just a normal number. Both are within bounds.
    """
    (low, high), info = self._bounds(), jnp.finfo(self.dtype)
    margin = _arrays.cast(self.margin, jnp.int32)
    top_mantissa, top_exponent = math.frexp(self._top())
    largest = jnp.max(amax_history)
    mantissa, exponent = jnp.frexp(largest)
    best = top_exponent - margin - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    best = jnp.clip(jnp.where(largest > 0, best, _NOTHING), low, high)
    lowest = jnp.maximum(best - (info.maxexp - 1 - info.minexp - margin), low)
    return largest > 0, best, jnp.where(largest > 0, lowest, low)

  def _top(self) -> float:
    """The largest number of the backward pass, as far as float32 goes."""
    return min(float(jnp.finfo(self.dtype).max), _arrays.FLOAT32_MAX)

  def _bottom(self) -> float:
    """The smallest number above zero of the backward pass, likewise."""
    smallest = float(jnp.finfo(self.dtype).smallest_subnormal)
    return max(smallest, _arrays.FLOAT32_TINY)

  def _bounds(self) -> tuple[jax.Array, jax.Array]:
    """The exponents of the lowest and of the highest scale."""
    # Traced bounds need not be powers of two. The scale is one between them.
    return (
      _powers_of_two.ceil_log2(self.min_scale),
      _powers_of_two.floor_log2(self.max_scale),
    )


def _last_rise(steps_since_overflow: jax.Array) -> jax.Array:
  """By how many binades the scale that failed rose last; 0 if it did not."""
  return (
    1 << jnp.minimum(steps_since_overflow // _STEPS_TO_RETRY, _RISES)
  ) >> 1
