"""The policy that follows the size of the gradients."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import (
  _arrays,
  _checks,
  _memory,
  _powers_of_two,
  _search,
  _state,
)
from optax_lossscale._memory import HeadroomMemory
from optax_lossscale._state import LossScaleState

# In binades a step. Gradients that underflowed look smaller than they are, so
# that a rise may go too far. It is limited, and the next step corrects it.
_LARGEST_RISE = 8
_LARGEST_DROP = 16

# In steps that had gradients. An overflow costs less than 500 steps earn, so
# that a NaN every 500 steps, which no scale prevents, costs no binade.
_COST_OF_OVERFLOW = 256
# It halves with each 6 binades that the ceiling is below the evidence, so that
# a ceiling that was learned from larger gradients is forgotten in time.
_COST_OF_A_BINADE = 4096
_BINADES_OF_A_PRICE = 6
# In binades below the evidence.
_DEEPEST_CEILING = 20
_NO_CEILING = 128  # above the exponent of each scale


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Keeps the largest gradient of the last steps some binades below overflow.

  As long as one scale holds all gradients with 16 binades to spare, at most
  128 steps with gradients are lost in a row, or 512 if only every n-th step
  has any (n up to 1,000) and the others are zeros or NaNs; long rows of such
  steps shortly before may add up to 1,024.

  The scale is a power of two, the lower of evidence and ceiling. The evidence
  brings the largest of the last ``window`` maxima ``-target`` binades below
  the top of ``dtype``; a maximum is the largest magnitude among the unscaled
  gradients of a step, and steps of zeros have none. The ceiling is what
  overflows teach. A step with gradients earns a credit of 1, the first
  overflow in a row costs 256, and if it cannot be paid, the ceiling is set a
  binade below the scale. A credit of 4,096 raises it again by one (2,048,
  1,024 or 512 if it is 6, 12 or 18 below the evidence); a step within a
  binade of overflow empties the credit. An overflow 20 binades below the
  evidence takes the ceiling away, since the scale is not the reason, and so
  does evidence that rises so far above it. For the moment, overflows in a row
  lower the scale by 1, 2, 4, 8 and then 16 binades each; it rises by at most
  8 a step.

  A step of zeros or an overflow is quiet: it brings no gradients, and the
  scale may be the reason. After 48 quiet steps in a row, and four times as
  many as came between gradients on average (at most 1,024), the search
  begins: one step in 4, picked by a hash, tries one of the scales 16 binades
  apart over the whole range. Gradients that come during the search are the
  new evidence, and the only one. Before there was any, zeros raise the scale;
  an overflow begins the search at once, and each of its steps is a guess, one
  in 4 of them ``init_scale``.

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
        ceiling=jnp.full((), _NO_CEILING, jnp.int32),
        credit=jnp.zeros((), jnp.int32),
        quiet_count=jnp.zeros((), jnp.int32),
        patience=jnp.zeros((), jnp.int32),
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
    # An earlier version had as many fields, with a number in this place.
    window = getattr(state.memory, "amax_window", 0)
    _state.check_memory(self, state, HeadroomMemory, fits=jnp.ndim(window) == 1)
    after = _state.record_step(state, grads_finite)
    finite, in_a_row = after.last_finite, after.notfinite_count
    has_grads = finite & (amax >= _arrays.FLOAT32_TINY) & jnp.isfinite(amax)
    was_guess, _ = self._guess(state.memory)
    memory = _arrays.select(
      has_grads,
      self._after_grads(state, amax),
      self._after_quiet(state, in_a_row, was_guess),
    )

    highest = self._highest(memory)
    # The scale of a guess that found nothing says nothing of the next.
    failed = was_guess & ~has_grads
    exponent = _powers_of_two.floor_log2(state.loss_scale)
    exponent = jnp.where(failed, highest, exponent)
    drop = jnp.minimum(1 << jnp.minimum(in_a_row - 1, 8), _LARGEST_DROP)
    limit = exponent + jnp.where(finite, _LARGEST_RISE, -drop)
    is_guess, guess = self._guess(memory)
    new = jnp.where(is_guess, guess, jnp.minimum(highest, limit))

    scale = _powers_of_two.power_of_two(jnp.clip(new, *self._bounds()))
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
    is_new = _memory.is_searching(memory) | ~_memory.has_evidence(memory)
    older = jnp.where(is_new, 0, memory.amax_window[:-1])
    window = jnp.concatenate([amax[None], older])

    was_close = amax * state.loss_scale > self._top() / 2
    credit = jnp.where(was_close, 0, memory.credit + 1)
    evidence = self._evidence(window)
    below = jnp.maximum(evidence - memory.ceiling, 0)
    price = _COST_OF_A_BINADE >> (below // _BINADES_OF_A_PRICE)
    bought = (memory.ceiling < _NO_CEILING) & (credit >= price)
    ceiling = memory.ceiling + bought.astype(jnp.int32)
    is_old = is_new | (evidence - ceiling > self._deepest())
    return HeadroomMemory(
      ceiling=jnp.where(is_old, _NO_CEILING, ceiling),
      credit=jnp.where(bought, 0, jnp.minimum(credit, _COST_OF_A_BINADE)),
      quiet_count=jnp.zeros((), jnp.int32),
      patience=_search.patience_after(memory.patience, memory.quiet_count),
      amax_window=window,
    )

  def _after_quiet(
    self, state: LossScaleState, in_a_row: jax.Array, was_guess: jax.Array
  ) -> HeadroomMemory:
    """The memory after a step of zeros, or one that was not finite."""
    memory = state.memory
    has_evidence = _memory.has_evidence(memory)
    evidence = self._evidence(memory.amax_window)
    costs = (in_a_row == 1) & has_evidence & ~was_guess
    left = memory.credit - _COST_OF_OVERFLOW
    lower = jnp.minimum(evidence, memory.ceiling) - 1
    ceiling = jnp.where(costs & (left < 0), lower, memory.ceiling)
    exponent = _powers_of_two.floor_log2(state.loss_scale)
    is_lowest = exponent <= self._bounds()[0]
    is_hopeless = is_lowest | (evidence - exponent >= self._deepest())
    is_hopeless &= (in_a_row > 0) & has_evidence
    quiet = optax.safe_increment(memory.quiet_count)
    # Without evidence there is nothing to wait for.
    begins = (in_a_row > 0) & ~has_evidence
    return memory._replace(
      ceiling=jnp.where(is_hopeless, _NO_CEILING, ceiling),
      credit=jnp.where(costs, jnp.maximum(left, 0), memory.credit),
      quiet_count=jnp.where(
        begins, jnp.maximum(quiet, _search.QUIET_TO_SEARCH), quiet
      ),
    )

  def _guess(self, memory: HeadroomMemory) -> tuple[jax.Array, jax.Array]:
    """Whether the next step is a guess, and the exponent of its scale."""
    is_guess, guess = _search.next_guess(
      memory.quiet_count,
      _memory.has_evidence(memory),
      _powers_of_two.floor_log2(_arrays.cast(self.init_scale, jnp.float32)),
      self._bounds(),
    )
    return _memory.is_searching(memory) & is_guess, guess

  def _deepest(self) -> jax.Array:
    """How far below the evidence a scale may be the reason of an overflow."""
    # No further than where the largest maximum would be subnormal.
    info = jnp.finfo(self.dtype)
    normal = info.maxexp - info.minexp + _arrays.cast(self.target, jnp.int32)
    return jnp.minimum(_DEEPEST_CEILING, normal)

  def _highest(self, memory: HeadroomMemory) -> jax.Array:
    """The exponent of the scale that evidence and ceiling allow."""
    evidence = jnp.where(
      _memory.has_evidence(memory),
      self._evidence(memory.amax_window),
      self._bounds()[1],
    )
    return jnp.minimum(evidence, memory.ceiling)

  def _evidence(self, window: jax.Array) -> jax.Array:
    """The exponent of the scale that the gradients ask for, within bounds."""
    top_mantissa, top_exponent = math.frexp(self._top())
    mantissa, exponent = jnp.frexp(jnp.max(window))
    best = top_exponent + _arrays.cast(self.target, jnp.int32) - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    return jnp.clip(best, *self._bounds())

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
