"""Convert a ``loss_scale`` argument (policy, name or number) to a policy."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from optax_lossscale import _arrays, _checks
from optax_lossscale._policies._base import FixedLossScale, LossScalePolicy
from optax_lossscale._policies._dynamic import DynamicLossScale
from optax_lossscale._policies._headroom import HeadroomLossScale

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
