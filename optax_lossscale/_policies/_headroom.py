"""The policy that follows the size of the gradients."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._policies import _memory, _powers_of_two, _search
from optax_lossscale._policies._memory import HeadroomMemory, NOTHING
from optax_lossscale._state import LossScaleState

# In binades. So far the scale rises at most, since gradients that underflowed
# look smaller than they are, and so far it falls.
_STRIDE = 8
_STEPS_TO_RETRY = 4096  # in steps with gradients


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
     which scale failed, or that none did, if it was as low as that.
  4. After 4,096 steps with gradients and without an overflow, the scale that
     failed counts as one binade higher, so that it is tried again.
  5. After 8 steps in a row without gradients, zeros or overflows, a search
     begins: one step in 4 tries a scale out of the whole range, and one that of
     the evidence; gradients that only these could see are the only evidence,
     and nothing has failed for them; others teach nothing of the limit, as
     overflows do there, and double the 8, up to 512, until gradients in a row
     bring it down again.

  So what overflows is learned, and then lost about once in 4,096 steps. What
  comes less often than that may be lost each time, and so may rows of large
  gradients where most of the other steps are NaN.

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

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    limit, window = _exponent(self.init_scale), int(self.window)
    memory = _memory.initial_memory(limit, _search.SHORTEST_WAIT, window)
    return _state.initial_state(self.init_scale, memory=memory)

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
    _state.check_memory(self, state, HeadroomMemory)
    after = _state.record_step(state, grads_finite)
    finite = after.last_finite
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    zeros, overflow = self._after_zeros(state), self._after_overflow(state)
    quiet = _arrays.select(finite, zeros, overflow)._replace(
      quiet_count=optax.safe_increment(state.memory.quiet_count)
    )
    memory = _arrays.select(has_grads, self._after_grads(state, amax), quiet)
    is_guess, guess = self._guess(memory)
    exponent = jnp.where(is_guess, guess, self._usual(memory))
    scale = _powers_of_two.power_of_two(exponent)
    moved = scale != state.loss_scale
    return after._replace(
      loss_scale=scale,
      finite_count=jnp.where(moved, jnp.int32(0), after.finite_count),
      memory=memory,
    )

  def _after_grads(
    self, state: LossScaleState, amax: jax.Array
  ) -> HeadroomMemory:
    """The memory after a finite step whose gradients were not all zero."""
    memory, held = state.memory, _exponent(state.loss_scale)
    was_guess, _ = self._guess(memory)
    usual = amax * _powers_of_two.power_of_two(self._usual(memory))
    is_new = was_guess & ((usual > self._top()) | (usual < self._bottom()))
    older = jnp.where(is_new, 0, memory.amax_window[:-1])
    is_due = memory.held_count + 1 >= _STEPS_TO_RETRY
    fail = jnp.minimum(memory.fail + is_due.astype(jnp.int32), NOTHING)
    fail = jnp.where(is_new | (memory.fail <= held), NOTHING, fail)
    limit = held + jnp.minimum((fail - held) // 2, _STRIDE)
    teaches = is_new | ~was_guess
    return HeadroomMemory(
      limit=jnp.where(teaches, limit, memory.limit),
      fail=jnp.where(teaches, fail, memory.fail),
      held_count=jnp.where(is_due, 0, memory.held_count + 1),
      quiet_count=jnp.zeros((), jnp.int32),
      wait=_search.wait_after(memory.wait, memory.quiet_count, ~is_new),
      amax_window=jnp.concatenate([amax[None], older]),
    )

  def _after_zeros(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a finite step without gradients."""
    memory, (_, high) = state.memory, self._bounds()
    has_evidence = jnp.max(memory.amax_window) > 0
    raised = jnp.minimum(memory.limit + _STRIDE, high)
    lifted = jnp.where(memory.fail == NOTHING, high, memory.limit)
    return memory._replace(limit=jnp.where(has_evidence, lifted, raised))

  def _after_overflow(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a step that was not finite."""
    memory, failed = state.memory, _exponent(state.loss_scale)
    lowest = self._lowest(memory.amax_window)
    fail = jnp.where(failed > lowest, failed, NOTHING)
    learned = memory._replace(
      limit=jnp.maximum(failed - _STRIDE, lowest),
      fail=jnp.where(state.notfinite_count == 0, fail, memory.fail),
      held_count=jnp.zeros((), jnp.int32),
    )
    was_guess, _ = self._guess(memory)
    return _arrays.select(was_guess, memory, learned)

  def _guess(self, memory: HeadroomMemory) -> tuple[jax.Array, jax.Array]:
    """Whether the next step is a guess, and the exponent of its scale."""
    has_evidence = jnp.max(memory.amax_window) > 0
    evidence = self._evidence(memory.amax_window)
    best = jnp.where(has_evidence, evidence, _exponent(self.init_scale))
    step = memory.quiet_count - memory.wait
    return _search.next_guess(step, memory.held_count, best, self._bounds())

  def _usual(self, memory: HeadroomMemory) -> jax.Array:
    """The exponent of the next scale, if it is no guess."""
    limit = jnp.maximum(memory.limit, self._lowest(memory.amax_window))
    return jnp.minimum(limit, self._evidence(memory.amax_window))

  def _lowest(self, window: jax.Array) -> jax.Array:
    """The exponent at which the largest of these is just a normal number."""
    info, (low, _) = jnp.finfo(self.dtype), self._bounds()
    binades = info.maxexp - 1 - info.minexp
    deepest = binades + _arrays.cast(self.target, jnp.int32)
    lowest = jnp.maximum(self._evidence(window) - deepest, low)
    return jnp.where(jnp.max(window) > 0, lowest, low)

  def _evidence(self, window: jax.Array) -> jax.Array:
    """The exponent of the scale that these maxima ask for, within bounds."""
    top_mantissa, top_exponent = math.frexp(self._top())
    largest = jnp.max(window)
    mantissa, exponent = jnp.frexp(largest)
    best = top_exponent + _arrays.cast(self.target, jnp.int32) - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    best = jnp.where(largest > 0, best, NOTHING)
    return jnp.clip(best, *self._bounds())

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
      _powers_of_two.ceil_log2(_arrays.cast(self.min_scale, jnp.float32)),
      _exponent(self.max_scale),
    )


def _exponent(scale: jax.typing.ArrayLike) -> jax.Array:
  """That of the largest power of two that is not above the scale."""
  return _powers_of_two.floor_log2(_arrays.cast(scale, jnp.float32))
