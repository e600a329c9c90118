"""A policy that looks at the gradients, and what such policies share."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _exponents, _policies, _state
from optax_lossscale._state import LossScaleState

# In binades. A growth may be wrong (gradients that underflowed look smaller
# than they are), so it comes in strides, which the next step corrects.
_LARGEST_GROWTH = 8
_BACKOFF = 2

_FLOAT32_MAX = jnp.finfo(jnp.float32).max


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale:
  """Keeps the largest gradient of the last steps just below overflow.

  Remembers the largest magnitude among the unscaled gradients of each of the
  last ``window`` applied steps, and multiplies the loss by the power of two
  that brings the largest of them ``target`` binades under the top of ``dtype``.
  The scale falls to it at once. It rises only if it is more than one binade
  under, and by 8 binades a step at most; if all those gradients were zero, they
  may have underflowed, and it rises by 8. A non-finite step lowers it by 2
  binades and is not remembered, so that the next finite one returns to the
  exact answer. But where a step overflows right after the scale rose, no such
  answer is to be had: what overflowed may be no gradient of a parameter but a
  value on the way to it. Then the scale returns to where it was, and this is
  the answer for a window of steps.

  While no step's largest gradient exceeds the largest of the window by more
  than ``-target`` binades, and the scale is above ``min_scale``, no step is
  lost: ``target=-3`` leaves room for a factor of 8.

  The gradients of the parameters are what it looks at. Where larger values
  occur on the way to them, one step is lost in each ``window``;
  :func:`~optax_lossscale.probe` shows them to it, and none is.

  Attributes:
    init_scale: the scale before the first step; a power of two, as are the
      other two.
    dtype: the dtype of the backward pass, whose largest number is the top.
    target: where to keep the largest gradient, in binades from the top; an
      integer in [-64, 64]. What counts are the gradients that ``update`` is
      given: where they are sums over 1,024 workers, each of which is far
      smaller, 10 more is right.
    window: over how many applied steps to take the maximum.
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
    >>> for amax in [2.0**-6, 2.0**-2, 2.0**-6]:
    ...   state = policy.adjust(state, jnp.array(True), grads_amax=amax)
    ...   print(state.loss_scale, state.loss_scale * amax)
    262144.0 4096.0
    16384.0 4096.0
    16384.0 256.0
  """

  init_scale: float = 2.0**15
  dtype: Any = jnp.float16
  target: int = -3
  window: int = 32
  min_scale: float = 2.0**-24
  max_scale: float = 2.0**126

  def __post_init__(self):
    check_scales(self)
    check_dtype(self.dtype)
    _state.check_number("target", self.target, -64, 64, integer=True)
    if isinstance(self.window, jax.core.Tracer):
      raise TypeError(
        "window must be a Python integer, since it is the shape of an array,"
        f" got window = {self.window!r}."
      )
    _state.check_number("window", self.window, 1, 2**20, integer=True)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    return _policies.initial_state(
      self.init_scale,
      memory={
        "amax_window": jnp.zeros((int(self.window),), jnp.float32),
        "amax_cursor": jnp.zeros((), jnp.int32),
        # By how many binades the last step raised the scale.
        "growth": jnp.zeros((), jnp.int32),
      },
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
    """
    amax = as_amax(self, grads_amax)
    after = _policies.record_step(state, grads_finite)
    finite = after.last_finite
    check_memory(self, state)
    exponent = _exponents.floor_log2(state.loss_scale)
    growth = state.memory["growth"]
    memory = _remember(
      state.memory,
      jnp.where(finite, amax, self._amax_for(exponent - growth)),
      finite | (growth > 0),
    )
    headroom = self._best_exponent(memory["amax_window"]) - exponent
    up = jnp.minimum(headroom, _LARGEST_GROWTH)
    up = jnp.where(up == 1, jnp.int32(0), up)
    down = jnp.where(growth > 0, growth, jnp.int32(_BACKOFF))
    new = bounded(self, exponent + jnp.where(finite, up, -down))
    memory["growth"] = jnp.where(finite, jnp.maximum(new - exponent, 0), 0)
    return move(after._replace(memory=memory), new)

  def _best_exponent(self, window):
    """The largest at which the window's maximum stays under the target."""
    top_mantissa, top_exponent = math.frexp(top(self))
    mantissa, exponent = jnp.frexp(jnp.max(window))
    best = top_exponent + _state.cast(self.target, jnp.int32) - exponent
    best -= (mantissa > top_mantissa).astype(jnp.int32)
    # Beyond any scale; how fast it rises and how far is not decided here.
    return jnp.where(mantissa > 0, best, jnp.int32(2**12))

  def _amax_for(self, exponent):
    """The maximum whose best exponent this is; inf if float32 ends before."""
    mantissa, top_exponent = math.frexp(top(self))
    exponent = top_exponent - 1 + _state.cast(self.target, jnp.int32) - exponent
    return 2 * mantissa * _exponents.power_of_two(jnp.clip(exponent, -126, 128))


def _remember(memory, amax, is_known):
  """The memory with one more maximum in it, in the place of the oldest."""
  is_known &= jnp.isfinite(amax)
  window, cursor = memory["amax_window"], memory["amax_cursor"]
  following = (cursor + 1) % window.shape[0]
  return memory | {
    "amax_window": jnp.where(is_known, window.at[cursor].set(amax), window),
    "amax_cursor": jnp.where(is_known, following, cursor),
  }


def as_amax(policy: Any, grads_amax: jax.typing.ArrayLike | None) -> jax.Array:
  """The maximum as float32, or an error that says how to get it."""
  if grads_amax is None:
    raise TypeError(
      f"{type(policy).__name__}.adjust must be given grads_amax, the largest"
      " magnitude among the unscaled gradients, got None. with_loss_scaling"
      " passes it; by hand it is optax.tree.norm(grads, ord='inf')."
    )
  return jnp.abs(_state.cast(grads_amax, jnp.float32))


def top(policy: Any) -> float:
  """The largest number of the policy's dtype, or of float32."""
  return min(float(jnp.finfo(policy.dtype).max), float(_FLOAT32_MAX))


def check_memory(policy: Any, state: LossScaleState) -> None:
  """Raises unless the memory is one of this class of policies."""
  own: Any = jax.tree.structure(jax.eval_shape(policy.init).memory)
  got: Any = jax.tree.structure(state.memory)
  if got != own:
    raise ValueError(
      f"state.memory must be that of a {type(policy).__name__}, got {got} of"
      " another policy. Use state._replace(memory=policy.init().memory)."
    )


def bounded(policy: Any, exponent: jax.Array) -> jax.Array:
  """The exponent, held within those of the policy's bounds."""
  # Traced bounds need not be powers of two, and bound those within.
  low = _exponents.ceil_log2(_state.cast(policy.min_scale, jnp.float32))
  high = _exponents.floor_log2(_state.cast(policy.max_scale, jnp.float32))
  return jnp.clip(exponent, low, high)


def move(state: LossScaleState, exponent: jax.Array) -> LossScaleState:
  """The state with 2**exponent for its scale."""
  scale = _exponents.power_of_two(exponent)
  moved = scale != state.loss_scale
  return state._replace(
    loss_scale=scale,
    finite_count=jnp.where(moved, jnp.int32(0), state.finite_count),
  )


def check_scales(policy: Any) -> None:
  """Raises unless the scales are powers of two, in range and in order."""
  for name in ("init_scale", "min_scale", "max_scale"):
    value = getattr(policy, name)
    _state.check_number(
      name, value, _state.SMALLEST_SCALE, _state.LARGEST_SCALE
    )
    is_traced = isinstance(value, jax.core.Tracer)
    if not is_traced and math.frexp(float(value))[0] != 0.5:
      raise ValueError(
        f"{name} must be a power of two, got {name} = {value!r}."
      )
  _policies.check_order(policy)


def check_dtype(dtype: Any) -> None:
  """Raises unless it is a float dtype."""
  try:
    is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    is_float = False
  if not is_float:
    raise TypeError(
      f"dtype must be a float dtype such as jnp.float16, got dtype = {dtype!r}."
    )
