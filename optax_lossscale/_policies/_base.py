"""The interface of loss scale policies, and the fixed loss scale."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax

from optax_lossscale import _checks, _state
from optax_lossscale._state import LossScaleState


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


def get_scale_bounds(policy: LossScalePolicy | None) -> tuple[Any, Any]:
  """The lowest and the highest scale of a policy; None if it names none."""
  return getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)


def get_lowest_scale(policy: LossScalePolicy | None) -> Any:
  """The scale at which no overflow lowers it; None if the policy names none.

  Some rules stop above their `min_scale`, and say where.
  """
  return getattr(policy, "lowest_scale", get_scale_bounds(policy)[0])


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
    _checks.convert_arrays_to_scalars(self)

  def init(self) -> LossScaleState:
    """Returns the state before the first step."""
    return _state.make_initial_state(self.scale)

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
