"""The policy that follows the size of the gradients."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._policies import _powers_of_two, _search
from optax_lossscale._policies._memory import HeadroomMemory
from optax_lossscale._state import LossScaleState

# In binades. So far the scale rises at most, and falls if neither this step nor
# the one before had gradients: one that underflowed looks smaller than it is.
_STRIDE = 8
# In steps with gradients: less than 500 earn, so that a NaN every 500 steps,
# which no scale prevents, costs nothing.
_COST_OF_OVERFLOW = 256
_FIRST_TERM, _LONGEST_TERM = 8, 8192
# The term halves with so many binades that the limit is below the evidence, so
# that one which was learned from larger gradients is forgotten in time.
_BINADES_OF_A_TERM = 6
# So far below the evidence an overflow is none of the scale: one that holds all
# with 16 of the 40 binades of float16 to spare is no lower.
_DEEPEST = 24
_NONE = 128  # above the exponent of each scale


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Keeps the largest gradient of the last steps some binades below overflow.

  The scale is a power of two, the lower of *evidence* and *limit*: the evidence
  brings the largest of the last ``window`` maxima ``-target`` binades below the
  top of ``dtype``, and the limit is halfway between the last scale that held
  gradients and the lowest that has overflowed since, at most 8 binades above
  the former. An overflow right after gradients lowers the limit by a binade,
  or costs 256 credits if there are so many, of which each step with gradients
  earns one; any other lowers it by 8, but none to further than 24 below the
  evidence, where the scale is not the reason. A scale that failed is tried
  again, one binade up, after a term of 8 steps with gradients: four times as
  many after each failure, up to 8,192, and half as many after each success.
  After 8 steps in a row without gradients, zeros or overflows, a search begins:
  one step in 4 tries a scale out of the whole range, and one that of the
  evidence; gradients that only these could see are the new evidence, and others
  double the 8, up to 512. Before any gradients, zeros raise the scale by 8
  binades each.

  In 10,000 random runs, and in those that a search for worse ones tried, at
  most 51 steps with gradients were lost in a row where hardly one has none,
  and 185 where they come seldom, as long as one scale holds all of them with
  16 binades to spare (``benchmarks/policies/adversary.py``). Most gradients may
  be lost where most steps are NaN, and those that overflow less often than once
  in 256 steps are lost for ever.

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
    return _state.initial_state(
      self.init_scale,
      memory=HeadroomMemory(
        safe=_exponent(self.init_scale),
        fail=jnp.full((), _NONE, jnp.int32),
        credit=jnp.zeros((), jnp.int32),
        term=jnp.full((), _FIRST_TERM, jnp.int32),
        quiet_count=jnp.zeros((), jnp.int32),
        wait=jnp.full((), _search.SHORTEST_WAIT, jnp.int32),
        amax_window=jnp.zeros((int(self.window),), jnp.float32),
      ),
    )

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
    amax = _as_amax(grads_amax)
    _state.check_memory(self, state, HeadroomMemory)
    after = _state.record_step(state, grads_finite)
    finite = after.last_finite
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    grads, zeros = self._after_grads(state, amax), self._after_zeros(state)
    overflow = self._after_overflow(state, after.notfinite_count)
    memory = _arrays.select(finite, zeros, overflow)
    memory = _arrays.select(has_grads, grads, memory)
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
    memory, exponent = state.memory, _exponent(state.loss_scale)
    was_guess, _ = self._guess(memory)
    usual = amax * _powers_of_two.power_of_two(self._usual(memory))
    is_new = was_guess & ((usual > self._top()) | (usual < self._bottom()))
    older = jnp.where(is_new, 0, memory.amax_window[:-1])
    window = jnp.concatenate([amax[None], older])

    over = jnp.maximum(exponent, self._lowest(window))
    fail = jnp.where(is_new | (memory.fail <= over), _NONE, memory.fail)
    was_close = amax * state.loss_scale > self._top() / 2
    credit = jnp.where(was_close, 0, memory.credit + 1)
    below = jnp.maximum(self._evidence(window) - _limit(exponent, fail), 0)
    is_due = credit >= memory.term >> (below // _BINADES_OF_A_TERM)
    is_due &= (below > 0) & (fail < _NONE)
    return HeadroomMemory(
      safe=exponent,
      fail=fail + is_due.astype(jnp.int32),
      credit=jnp.where(is_due, 0, jnp.minimum(credit, _LONGEST_TERM)),
      term=jnp.where(is_due, jnp.maximum(memory.term // 2, 1), memory.term),
      quiet_count=jnp.zeros((), jnp.int32),
      wait=_search.wait_after(memory.wait, memory.quiet_count, ~is_new),
      amax_window=window,
    )

  def _after_zeros(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a finite step without gradients."""
    memory, window = state.memory, state.memory.amax_window
    has_evidence = jnp.max(window) > 0
    is_over = ~has_evidence | (memory.fail <= self._lowest(window))
    # Before any gradients, zeros raise the scale by a stride.
    tried = jnp.maximum(memory.safe, _exponent(state.loss_scale))
    highest = jnp.where(has_evidence, self._evidence(window), tried)
    return memory._replace(
      safe=jnp.where(is_over, highest, memory.safe),
      fail=jnp.where(is_over, _NONE, memory.fail),
      quiet_count=optax.safe_increment(memory.quiet_count),
    )

  def _after_overflow(
    self, state: LossScaleState, in_a_row: jax.Array
  ) -> HeadroomMemory:
    """The memory after a step that was not finite."""
    memory, exponent = state.memory, _exponent(state.loss_scale)
    follows_grads = memory.quiet_count == 0
    left = memory.credit - _COST_OF_OVERFLOW
    forgiven = memory._replace(credit=left)
    # Halfway between the two is the exponent less the drop, or the lowest.
    drop = jnp.where(follows_grads, 1, _STRIDE)
    safe = jnp.minimum(memory.safe, exponent - 2 * drop)
    lowest = self._lowest(memory.amax_window)
    longer = jnp.minimum(4 * memory.term, _LONGEST_TERM)
    failed = memory._replace(
      safe=jnp.maximum(safe, 2 * lowest - exponent),
      fail=jnp.minimum(memory.fail, exponent),
      credit=jnp.zeros((), jnp.int32),
      term=jnp.where(in_a_row == 1, longer, memory.term),
    )
    was_guess, _ = self._guess(memory)
    learned = _arrays.select(follows_grads & (left >= 0), forgiven, failed)
    return _arrays.select(was_guess, memory, learned)._replace(
      quiet_count=optax.safe_increment(memory.quiet_count)
    )

  def _guess(self, memory: HeadroomMemory) -> tuple[jax.Array, jax.Array]:
    """Whether the next step is a guess, and the exponent of its scale."""
    has_evidence = jnp.max(memory.amax_window) > 0
    evidence = self._evidence(memory.amax_window)
    best = jnp.where(has_evidence, evidence, _exponent(self.init_scale))
    step = memory.quiet_count - memory.wait
    return _search.next_guess(step, best, self._bounds())

  def _usual(self, memory: HeadroomMemory) -> jax.Array:
    """The exponent of the next scale, if it is no guess."""
    evidence = self._evidence(memory.amax_window)
    limit = _limit(memory.safe, memory.fail)
    return jnp.clip(jnp.minimum(evidence, limit), *self._bounds())

  def _lowest(self, window: jax.Array) -> jax.Array:
    """The exponent at which the scale is no reason for an overflow any more."""
    # No lower than where the largest maximum would be subnormal.
    info = jnp.finfo(self.dtype)
    normal = (
      info.maxexp - 1 - info.minexp + _arrays.cast(self.target, jnp.int32)
    )
    deepest = self._evidence(window) - jnp.minimum(_DEEPEST, normal)
    low, _ = self._bounds()
    return jnp.where(jnp.max(window) > 0, jnp.maximum(deepest, low), low - 1)

  def _evidence(self, window: jax.Array) -> jax.Array:
    """The exponent of the scale that these maxima ask for, within bounds."""
    top_mantissa, top_exponent = math.frexp(self._top())
    largest = jnp.max(window)
    mantissa, exponent = jnp.frexp(largest)
    best = top_exponent + _arrays.cast(self.target, jnp.int32) - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    return jnp.clip(jnp.where(largest > 0, best, _NONE), *self._bounds())

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


def _limit(safe: jax.Array, fail: jax.Array) -> jax.Array:
  """The exponent halfway between, and at most a stride above the lower."""
  return safe + jnp.minimum((fail - safe) // 2, _STRIDE)


def _as_amax(grads_amax: jax.typing.ArrayLike | None) -> jax.Array:
  """The maximum as float32, or an error that says how to get it."""
  if grads_amax is None:
    raise TypeError(
      "HeadroomLossScale.adjust must be given grads_amax, the largest"
      " magnitude among the unscaled gradients, got None. with_loss_scaling"
      " passes it; by hand it is optax.tree.norm(grads, ord='inf')."
    )
  return jnp.abs(_arrays.cast(grads_amax, jnp.float32))
