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
class HeadroomMemory(NamedTuple):
  """What :class:`HeadroomLossScale` remembers.

  Scales are told by their binary logarithms.

  Attributes:
    limit: the scale that what held gradients and what overflowed allow; int32,
      shape ``()``.
    fail: the scale that failed last, or 128 if there is none, or if one as high
      has held gradients since; int32, shape ``()``.
    held_count: steps with gradients since the last overflow, which tell when
      the scale that failed rises, and by how much; int32, shape ``()``. It is
      -1 before the first step.
    quiet_count: steps in a row that brought no gradients, since all were zero
      or some were not finite; int32, shape ``()``.
    wait: how many of these it takes until a search begins; int32, shape
      ``()``.
    amax_window: the largest magnitude of each of the last steps that had
      gradients other than zero, the newest first; float32, shape ``(window,)``.
      Zeros where there was no such step yet.
  """

  limit: jax.Array
  fail: jax.Array
  held_count: jax.Array
  quiet_count: jax.Array
  wait: jax.Array
  amax_window: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Keeps the largest gradient of the last steps some binades below overflow.

  The scale is a power of two, the lower of *evidence* and *limit*:

  1. The evidence brings the largest gradient of the last ``window`` steps that
     had any ``-target`` binades below the top of ``dtype``.
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
  ``target`` above -4 as many times above the top as the target is higher, since
  a sum may be.) At a scale so low that it fits below the top, it cannot be told
  from others, and is followed.

  Values on the way to the gradients may be larger than these, and only
  overflows teach the policy of them.
  :func:`~optax_lossscale.diagnostics.probe` shows them to it, so that these
  steps are not lost.

  Attributes:
    init_scale: the scale before the first step; a power of two, as are the
      other two.
    dtype: the dtype of the backward pass, whose largest number is the top.
    target: where to keep the largest gradient, in binades from the top; an
      integer in [-64, 64]. What counts is the gradients that ``update`` is
      given. If they are sums over 1,024 workers, and the gradient of each
      worker is that much smaller, add 10. ``-1`` keeps more of the smallest
      gradients, and loses more steps.
    window: how many maxima to remember.
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
  target: int = -4
  window: int = 8
  min_scale: float = 2.0**-24
  max_scale: float = 2.0**126

  def __post_init__(self) -> None:
    _checks.check_powers_of_two(self)
    # One of the ways to write a dtype, so that equal policies are equal.
    object.__setattr__(self, "dtype", _checks.as_float_dtype(self.dtype))
    _checks.check_number("target", self.target, -64, 64, integer=True)
    if isinstance(self.window, jax.core.Tracer):
      raise TypeError(
        "window must be a Python integer, since it is the shape of an array,"
        f" got window = {self.window!r}."
      )
    _checks.check_number("window", self.window, 1, 2**20, integer=True)
    _checks.keep_numbers(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    memory = HeadroomMemory(
      limit=_powers_of_two.floor_log2(self.init_scale),
      fail=jnp.full((), _NOTHING, jnp.int32),
      held_count=jnp.full((), -1, jnp.int32),
      quiet_count=jnp.zeros((), jnp.int32),
      wait=jnp.full((), _search.SHORTEST_WAIT, jnp.int32),
      amax_window=jnp.zeros((int(self.window),), jnp.float32),
    )
    return _state.initial_state(self.init_scale, memory)

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
        "HeadroomLossScale.adjust must be given grads_amax, the largest"
        " magnitude among the unscaled gradients, got None. with_loss_scaling"
        " passes it; by hand it is optax.tree.norm(grads, ord='inf')."
      )
    amax = jnp.abs(_arrays.cast(grads_amax, jnp.float32))
    memory = _state.memory_of(self, state, HeadroomMemory)
    state = state._replace(memory=self._begun(memory))
    after = _state.record_step(state, grads_finite)
    finite = after.last_finite
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    amax = self._as_evidence(state, amax)
    was_guess, _ = self._guess(state.memory)
    zeros, overflow = self._after_zeros(state), self._after_overflow(state)
    overflow = _arrays.select(was_guess, state.memory, overflow)
    quiet = _arrays.select(finite, zeros, overflow)._replace(
      quiet_count=optax.safe_increment(state.memory.quiet_count)
    )
    grads = self._after_grads(state, amax, was_guess)
    memory = _arrays.select(has_grads, grads, quiet)
    is_guess, guess = self._guess(memory)
    exponent = jnp.where(is_guess, guess, self._usual(memory))
    scale = _powers_of_two.power_of_two(exponent)
    moved = scale != state.loss_scale
    return after._replace(
      loss_scale=scale,
      finite_count=jnp.where(moved, jnp.int32(0), after.finite_count),
      memory=memory,
    )

  def _begun(self, memory: HeadroomMemory) -> HeadroomMemory:
    """The memory; before the first step that of `init`, whatever else it holds.

    What fills the fields that a checkpoint of another version lacks with those
    of a fresh state, as Flax' checkpoints do, mixes the two.
    """
    zeros = jnp.zeros_like(memory.amax_window)
    first = self.init().memory._replace(amax_window=zeros)
    begun = _arrays.select(memory.held_count < 0, first, memory)
    return begun._replace(held_count=jnp.maximum(memory.held_count, 0))

  def _as_evidence(self, state: LossScaleState, amax: jax.Array) -> jax.Array:
    """What to remember of a finite step for its largest gradient.

    This itself, if it may have been in half precision. If it was not, it says
    only that this scale held: what asks for one that is higher by a stride, or
    for a usual one, so that rows of overflows do not lead to where it could be
    taken for half.
    """
    held = _powers_of_two.floor_log2(state.loss_scale)
    # Above -4, the target allows for the sum of so many numbers in half.
    target = _arrays.cast(self.target, jnp.int32)
    summands = _powers_of_two.power_of_two(jnp.maximum(target + 4, 0))
    may_be_half = amax * state.loss_scale <= self._top() * summands
    _, top_exponent = math.frexp(self._top())
    exponent = top_exponent - 1 + target - jnp.maximum(held + _STRIDE, _USUAL)
    asks_for_it = _powers_of_two.power_of_two(jnp.clip(exponent, -126, 127))
    return jnp.where(may_be_half, amax, asks_for_it)

  def _after_grads(
    self, state: LossScaleState, amax: jax.Array, was_guess: jax.Array
  ) -> HeadroomMemory:
    """The memory after a finite step whose gradients were not all zero."""
    memory, held = state.memory, _powers_of_two.floor_log2(state.loss_scale)
    usual = amax * _powers_of_two.power_of_two(self._usual(memory))
    is_new = was_guess & ((usual > self._top()) | (usual < self._bottom()))
    older = jnp.where(is_new, 0, memory.amax_window[:-1])
    held_count = optax.safe_increment(memory.held_count)
    is_due = held_count % _STEPS_TO_RETRY == 0
    rise = jnp.where(is_due, _last_rise(held_count), 0)
    fail = jnp.minimum(memory.fail + rise, _NOTHING)
    teaches = is_new | ~was_guess
    is_over = is_new | (teaches & (memory.fail <= held))
    fail = jnp.where(is_over, _NOTHING, fail)
    limit = held + jnp.minimum((fail - held) // 2, _STRIDE)
    return HeadroomMemory(
      limit=jnp.where(teaches, limit, memory.limit),
      fail=fail,
      held_count=held_count,
      quiet_count=jnp.zeros((), jnp.int32),
      wait=_search.wait_after(memory.wait, memory.quiet_count, ~is_new),
      amax_window=jnp.concatenate([amax[None], older]),
    )

  def _after_zeros(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a finite step without gradients."""
    memory, (_, high) = state.memory, self._bounds()
    raised = jnp.minimum(memory.limit + _STRIDE, high)
    lifted = jnp.where(memory.fail == _NOTHING, high, memory.limit)
    has_evidence = jnp.max(memory.amax_window) > 0
    return memory._replace(limit=jnp.where(has_evidence, lifted, raised))

  def _after_overflow(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a step that was no guess, and not finite."""
    memory, failed = state.memory, _powers_of_two.floor_log2(state.loss_scale)
    has_evidence, _, lowest = self._evidence(memory.amax_window)
    # What the last rise tried is taken back: the scale before it had held.
    fail = jnp.minimum(failed, memory.fail - _last_rise(memory.held_count))
    fail = jnp.where(has_evidence & (failed > lowest), fail, _NOTHING)
    return memory._replace(
      limit=jnp.maximum(failed - _STRIDE, lowest),
      fail=jnp.where(state.notfinite_count == 0, fail, memory.fail),
      held_count=jnp.zeros((), jnp.int32),
    )

  def _guess(self, memory: HeadroomMemory) -> tuple[jax.Array, jax.Array]:
    """Whether the next step is a guess, and the exponent of its scale."""
    has_evidence, evidence, _ = self._evidence(memory.amax_window)
    first = _powers_of_two.floor_log2(self.init_scale)
    best = jnp.where(has_evidence, evidence, first)
    step = memory.quiet_count - memory.wait
    return _search.next_guess(step, memory.held_count, best, self._bounds())

  def _usual(self, memory: HeadroomMemory) -> jax.Array:
    """The exponent of the next scale, if it is no guess."""
    _, evidence, lowest = self._evidence(memory.amax_window)
    return jnp.minimum(jnp.maximum(memory.limit, lowest), evidence)

  def _evidence(
    self, window: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether there are maxima, and the exponents of two scales for them.

    The first scale is the one that they ask for, the second the lowest: there
    the largest of them is just a normal number. Both are within bounds.
    """
    (low, high), info = self._bounds(), jnp.finfo(self.dtype)
    target = _arrays.cast(self.target, jnp.int32)
    top_mantissa, top_exponent = math.frexp(self._top())
    largest = jnp.max(window)
    mantissa, exponent = jnp.frexp(largest)
    best = top_exponent + target - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    best = jnp.clip(jnp.where(largest > 0, best, _NOTHING), low, high)
    lowest = jnp.maximum(best - (info.maxexp - 1 - info.minexp + target), low)
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


def _last_rise(held_count: jax.Array) -> jax.Array:
  """By how many binades the scale that failed rose last; 0 if it did not."""
  return (1 << jnp.minimum(held_count // _STEPS_TO_RETRY, _RISES)) >> 1
