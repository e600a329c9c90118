"""The policies by what ``with_loss_scaling(loss_scale=...)`` is given."""

from collections.abc import Callable
from typing import Any

from optax_lossscale import _arrays, _checks
from optax_lossscale._policies._headroom import HeadroomLossScale
from optax_lossscale._policies._plain import (
  DynamicLossScale,
  FixedLossScale,
  LossScalePolicy,
)

_NAMED: dict[str, Callable[[], LossScalePolicy]] = {
  "dynamic": DynamicLossScale,
  "headroom": HeadroomLossScale,
}


def as_policy(loss_scale: Any) -> LossScalePolicy:
  """The policy that ``with_loss_scaling(loss_scale=...)`` stands for."""
  if isinstance(loss_scale, str) and loss_scale in _NAMED:
    return _NAMED[loss_scale]()
  if isinstance(loss_scale, LossScalePolicy) and not isinstance(
    loss_scale, type
  ):
    return loss_scale
  if not _arrays.is_array_like(loss_scale) or isinstance(loss_scale, bool):
    raise TypeError(
      "loss_scale must be a policy (such as DynamicLossScale()), 'dynamic',"
      f" 'headroom' or a positive number, got loss_scale = {loss_scale!r}."
    )
  _checks.check_scale("loss_scale", loss_scale)
  return FixedLossScale(loss_scale)
