"""The policy that follows the size of the gradients."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _arrays, _checks, _powers_of_two, _state
from optax_lossscale._state import LossScaleState

# In binades a step. Gradients that underflowed look smaller than they are, so
# that a rise may go too far. It is limited, and the next step corrects it.
_LARGEST_RISE = 8
_LARGEST_DROP = 16

# In steps that had gradients. An overflow costs less than 500 steps earn, so
# that a NaN every 500 steps, which no scale prevents, costs no binade.
_COST_OF_OVERFLOW = 256
_COST_OF_A_BINADE = 4096

# After so many steps of zeros in a row they may be gradients that underflowed.
# It is a prime number: gradients that come in every n-th step then meet each
# guess in turn, if n is no multiple of it.
_ZEROS_TO_DOUBT = 61
# Before the first evidence. float16 holds a gradient at 40 scales in a row, so
# that strides of 16 do not miss all of them.
_GUESS_STRIDE = 16
# Then. More would hide gradients that fall by 28 binades at once.
_CAUTION_IN_DOUBT = 8


class HeadroomMemory(NamedTuple):
  """What :class:`HeadroomLossScale` remembers.

  Attributes:
    amax_window: the largest magnitude of each of the last steps that had
      gradients other than zero; float32, shape ``(window,)``. Zeros where there
      was no such step yet.
    amax_cursor: where the next one is written; int32, shape ``()``.
    caution: how many binades the scale stays below the one that the window asks
      for; int32, shape ``()``.
    credit: how many steps there are to pay for an overflow; int32, shape
      ``()``.
    zero_count: steps of zeros in a row; int32, shape ``()``.
  """

  amax_window: jax.Array
  amax_cursor: jax.Array
  caution: jax.Array
  credit: jax.Array
  zero_count: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Keeps the largest gradient of the last steps some binades below overflow.

  The scale is a power of two: the evidence minus the caution.

  The evidence is the scale that brings the largest of the last ``window``
  maxima ``-target`` binades below the top of ``dtype``. A maximum is the
  largest magnitude among the unscaled gradients of one step. Steps whose
  gradients are all zero do not count as evidence. The scale falls to the
  evidence at once, and rises to it by at most 8 binades a step. Before the
  first gradient that is not zero, the evidence is ``max_scale``, since zeros
  may be gradients that underflowed. If there was an overflow by then, it is
  ``init_scale``.

  An overflow does two things. For the moment it lowers the scale, by 1, 2, 4, 8
  and then 16 binades if several come in a row; the next finite step takes this
  back. In the long run it costs credit. Each step with gradients earns a credit
  of 1, up to 4,096, and the first overflow in a row costs 256. If the credit is
  too small, it is lost, and the caution grows by a binade. A credit of 4,096
  buys a binade back. A step that came within a binade of overflow empties the
  credit. So a rare NaN costs nothing, the caution learns from overflows that
  come again and again, and a binade that is bought back too early costs one
  step.

  If a step overflows at ``min_scale``, or at a scale so low that even the
  largest maximum of the window would be subnormal, the scale cannot be the
  reason, and the caution is set to zero. If 61 steps in a row have only zeros,
  these may be gradients that underflowed, and a caution above 8 is halved, to 8
  at least.

  After an overflow before the first evidence, nothing is known, and the policy
  guesses. It begins a binade below ``init_scale``. Each further overflow, and
  each 61 steps of zeros in a row, make it try 16 binades less, and after
  ``min_scale`` it begins again. The first evidence sets the caution to zero.

  The policy does not see values on the way to the gradients, which may be
  larger. The caution learns from the overflows that they cause.
  :func:`~optax_lossscale.diagnostics.probe` shows them to the policy, so that
  these steps are not lost.

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
        amax_window=jnp.zeros((int(self.window),), jnp.float32),
        amax_cursor=jnp.zeros((), jnp.int32),
        caution=jnp.zeros((), jnp.int32),
        credit=jnp.zeros((), jnp.int32),
        zero_count=jnp.zeros((), jnp.int32),
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
    finite, in_a_row = after.last_finite, after.notfinite_count
    has_grads = (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    after_grads = self._after_grads(state, amax)
    memory = _arrays.select(
      finite,
      _arrays.select(has_grads, after_grads, self._after_zeros(state)),
      self._after_overflow(state, is_first=in_a_row == 1),
    )

    exponent = _powers_of_two.floor_log2(state.loss_scale)
    drop = jnp.minimum(1 << jnp.minimum(in_a_row - 1, 8), _LARGEST_DROP)
    limit = jnp.where(finite, exponent + _LARGEST_RISE, exponent - drop)
    low, high = self._bounds()
    # Evidence may be far above the bounds. The caution would have no effect if
    # it were subtracted before the evidence is held within them.
    evidence = jnp.clip(self._evidence(memory), low, high)
    new = jnp.clip(jnp.minimum(evidence - memory.caution, limit), low, high)

    scale = _powers_of_two.power_of_two(new)
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
    memory = state.memory
    was_close = amax * state.loss_scale > self._top() / 2
    credit = jnp.where(was_close, 0, memory.credit + 1)
    is_full = credit >= _COST_OF_A_BINADE
    bought = is_full & (memory.caution > 0)
    cursor = memory.amax_cursor
    return HeadroomMemory(
      # A state that was read from a file may hold numpy arrays.
      amax_window=jnp.asarray(memory.amax_window).at[cursor].set(amax),
      amax_cursor=(cursor + 1) % memory.amax_window.shape[0],
      caution=jnp.where(
        jnp.max(memory.amax_window) > 0,
        memory.caution - bought.astype(jnp.int32),
        0,  # The first evidence replaces what was learned without any.
      ),
      credit=jnp.where(bought, 0, jnp.minimum(credit, _COST_OF_A_BINADE)),
      zero_count=jnp.zeros((), jnp.int32),
    )

  def _after_zeros(self, state: LossScaleState) -> HeadroomMemory:
    """The memory after a finite step whose gradients were all zero."""
    memory, caution = state.memory, state.memory.caution
    zero_count = memory.zero_count + 1
    in_doubt = zero_count >= _ZEROS_TO_DOUBT
    relaxed = jnp.maximum(caution // 2, _CAUTION_IN_DOUBT)
    has_evidence = jnp.max(memory.amax_window) > 0
    other = jnp.where(
      has_evidence, jnp.minimum(caution, relaxed), self._next_guess(state)
    )
    # Without caution, the scale is as high as it may be.
    changes = in_doubt & (caution > 0)
    return memory._replace(
      caution=jnp.where(changes, other, caution),
      zero_count=jnp.where(in_doubt, 0, zero_count),
    )

  def _next_guess(self, state: LossScaleState) -> jax.Array:
    """The caution with which to look for the first gradients next."""
    caution = state.memory.caution
    begins = (caution == 0) | self._is_lowest(state)
    return jnp.where(begins, 1, caution + _GUESS_STRIDE)

  def _is_lowest(self, state: LossScaleState) -> jax.Array:
    return _powers_of_two.floor_log2(state.loss_scale) <= self._bounds()[0]

  def _after_overflow(
    self, state: LossScaleState, is_first: jax.Array
  ) -> HeadroomMemory:
    """The memory after a step that was not finite."""
    memory = state.memory
    largest = jnp.max(memory.amax_window)
    has_evidence = largest > 0
    left = memory.credit - _COST_OF_OVERFLOW
    is_paid = ~is_first | (left >= 0)
    more = jnp.where(has_evidence, memory.caution + 1, self._next_guess(state))
    caution = jnp.where(is_paid, memory.caution, more)
    tiny = _arrays.cast(jnp.finfo(self.dtype).smallest_normal, jnp.float32)
    is_subnormal = largest * state.loss_scale < tiny
    is_hopeless = has_evidence & (is_subnormal | self._is_lowest(state))
    return memory._replace(
      caution=jnp.where(is_hopeless, 0, caution),
      credit=jnp.where(is_first, jnp.maximum(left, 0), memory.credit),
      zero_count=jnp.zeros((), jnp.int32),
    )

  def _evidence(self, memory: HeadroomMemory) -> jax.Array:
    """The exponent of the scale that the gradients ask for, bounds or not."""
    top_mantissa, top_exponent = math.frexp(self._top())
    mantissa, exponent = jnp.frexp(jnp.max(memory.amax_window))
    best = top_exponent + _arrays.cast(self.target, jnp.int32) - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    # Without evidence, any caution comes from an overflow.
    without = jnp.where(memory.caution > 0, self.init_scale, self.max_scale)
    without = _powers_of_two.floor_log2(_arrays.cast(without, jnp.float32))
    return jnp.where(mantissa > 0, best, without)

  def _top(self) -> float:
    """The largest number of the backward pass, as far as float32 goes."""
    return min(float(jnp.finfo(self.dtype).max), _arrays.FLOAT32_MAX)

  def _bounds(self) -> tuple[jax.Array, jax.Array]:
    """The exponents of the lowest and of the highest scale."""
    # Traced bounds need not be powers of two. The scale is one between them.
    return (
      _powers_of_two.ceil_log2(_arrays.cast(self.min_scale, jnp.float32)),
      _powers_of_two.floor_log2(_arrays.cast(self.max_scale, jnp.float32)),
    )


def _as_amax(grads_amax: jax.typing.ArrayLike | None) -> jax.Array:
  """The maximum as float32, or an error that says how to get it."""
  if grads_amax is None:
    raise TypeError(
      "HeadroomLossScale.adjust must be given grads_amax, the largest"
      " magnitude among the unscaled gradients, got None. with_loss_scaling"
      " passes it; by hand it is optax.tree.norm(grads, ord='inf')."
    )
  return jnp.abs(_arrays.cast(grads_amax, jnp.float32))
