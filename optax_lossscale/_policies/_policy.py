"""The interface of policies, ``FixedLossScale``, and arguments for a policy."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from optax_lossscale import _arrays, _checks, _state
from optax_lossscale._policies._dynamic import DynamicLossScale
from optax_lossscale._policies._headroom import HeadroomLossScale
from optax_lossscale._state import LossScaleState


@runtime_checkable
class LossScalePolicy(Protocol):
  """The protocol of a policy: two pure functions without internal state.

  A policy is an immutable object that holds only hyperparameters. Everything
  that changes is in the :class:`LossScaleState` that it returns. You can pass
  any object with these two methods to
  :func:`~optax_lossscale.with_loss_scaling`.

  A policy may have the attributes ``min_scale`` and ``max_scale``, its lowest
  and highest scale. With them, :func:`loss_scale_metrics` reports if the scale
  cannot decrease any further.

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
        shape ``()``. Undefined if they were not finite. Under ``jit`` it is not
        computed for a policy that does not use it.

    Returns:
      A state of the same structure, shapes and dtypes.
    """
    ...


def get_scale_bounds(policy: LossScalePolicy) -> tuple[Any, Any]:
  """Return the lowest and the highest scale of a policy; None if unknown."""
  return getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
  """A loss scale that never changes.

  Steps with nonfinite gradients are still skipped. Use ``FixedLossScale(1.0)``
  to skip without scaling, for example in bfloat16.

  Attributes:
    scale: the factor that multiplies the loss, in [2**-126, 2**126]. A power of
      two changes no bit of a gradient that neither overflows nor underflows.
      Any other number rounds each gradient twice, once when the loss is scaled
      and once when the gradient is unscaled (a relative error of about 1e-7 in
      float32 gradients, and of 1e-3 in float16 gradients).

  Raises:
    TypeError: if ``scale`` is not a number.
    ValueError: if ``scale`` is out of range.

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


PolicyLike = (
  LossScalePolicy | jax.typing.ArrayLike | Literal["dynamic", "headroom"]
)

_POLICY_BY_NAME: dict[str, Callable[[], LossScalePolicy]] = {
  "dynamic": DynamicLossScale,
  "headroom": HeadroomLossScale,
}


def as_policy(loss_scale: Any, name: str = "loss_scale") -> LossScalePolicy:
  """Convert a policy, a name or a number to a policy.

  Args:
    loss_scale: the argument of a public function.
    name: the name of the argument, for error messages.

  Raises:
    TypeError: if the argument is something else.
    ValueError: if it is a number out of range.
  """
  if isinstance(loss_scale, str) and loss_scale in _POLICY_BY_NAME:
    return _POLICY_BY_NAME[loss_scale]()
  is_class = isinstance(loss_scale, type)
  if isinstance(loss_scale, LossScalePolicy) and not is_class:
    return loss_scale
  # The class of a policy may have a dtype, as an array does.
  is_number = _arrays.is_array_like(loss_scale) and not is_class
  if not is_number or isinstance(loss_scale, bool):
    hint = " Call it to create the policy." if is_class else ""
    raise TypeError(
      f"{name} must be a policy (such as DynamicLossScale()), 'dynamic',"
      " 'headroom' or a positive number, got"
      f" {_checks.describe_arg(name, loss_scale)}.{hint}"
    )
  _checks.check_scale(name, loss_scale)
  return FixedLossScale(loss_scale)


def uses_grads_amax(policy: LossScalePolicy) -> bool:
  """Return whether a policy may read the ``grads_amax`` of ``adjust``.

  False only for the methods that are known to ignore it, not for those of a
  subclass.
  """
  method = getattr(policy.adjust, "__func__", None)
  return method not in (DynamicLossScale.adjust, FixedLossScale.adjust)
