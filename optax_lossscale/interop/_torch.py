"""Imports and exports torch.amp.GradScaler.

Lightning and Accelerate use it, too.
"""

from collections.abc import Mapping
from typing import Any

from optax_lossscale import _checks, _policies, _transfer_guard
from optax_lossscale.interop import _reading, _writing
from optax_lossscale.interop._reading import FieldSpec

_KEYS = {
  "scale": FieldSpec("loss_scale"),
  "growth_factor": FieldSpec("growth_factor"),
  "backoff_factor": FieldSpec("backoff_factor"),
  "growth_interval": FieldSpec("growth_interval"),
  "_growth_tracker": FieldSpec("finite_count"),
}
_WRITTEN_FIELDS = "growth_factor", "backoff_factor", "growth_interval"


@_transfer_guard.allow_transfers
def from_torch(state_dict: Any) -> _reading.PolicyAndState:
  """The policy and state of a `torch.amp.GradScaler`.

  torch raises the scale on the `growth_interval`-th finite step, and has no
  minimum scale. Our minimum is 2**-126, the smallest normal float32 number. The
  maximum of torch is 2**127. Our maximum is 2**126, since the reciprocal of
  2**127 is flushed to zero. torch multiplies by its factors in float64, so the
  scale may differ in the last bit if a factor is not a power of two.

  Args:
    state_dict: `scaler.state_dict()`. The state dict of a disabled scaler is
      empty, and gives `FixedLossScale(1.0)`. This policy skips non-finite
      steps. A disabled scaler applies them, and so does a bare optimizer.

  Returns:
    `(policy, state)`. The state dict holds the current scale and not the
    initial one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_torch({
    ...     "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
    ...     "growth_interval": 2000, "_growth_tracker": 17})
    >>> policy.growth_interval, state.finite_count.item()
    (2000, 17)
  """
  if isinstance(state_dict, Mapping) and not state_dict:
    return _reading.initial_result(_policies.FixedLossScale(1.0))
  if hasattr(type(state_dict), "state_dict"):
    raise TypeError(
      "from_torch: state_dict must be a dict, got an object of type"
      f" {type(state_dict).__name__}. Pass scaler.state_dict()."
    )
  values = _reading.read_fields("from_torch", "state_dict", state_dict, _KEYS)
  policy = _reading.make_dynamic_policy(values)
  return _reading.resumed_result("from_torch", policy, values)


@_transfer_guard.allow_transfers
def to_torch(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The state dict with which a `GradScaler` continues as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` that torch can express:
      without hysteresis, and with `min_scale` 2**-126 and `max_scale` 2**126,
      which are unbounded; or `FixedLossScale(1.0)`, a disabled scaler.
    state: its state, or a pytree that holds it.

  Returns:
    The argument of `scaler.load_state_dict`; `{}` for a disabled scaler, which
    has nothing to load.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if torch can't express the policy, or the tree has no state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(min_scale=2.0**-126)
    >>> ols.interop.to_torch(policy, policy.init())["scale"]
    32768.0
  """
  caller = "to_torch"
  if isinstance(policy, _policies.FixedLossScale):
    required_scale = 1.0, "a disabled GradScaler has the scale 1"
    _writing.check_hyperparams(caller, policy, (), scale=required_scale)
    return {}
  required_floor = (_checks.MIN_LOSS_SCALE, "it has no minimum scale")
  dynamic_policy = _writing.as_dynamic_policy(
    caller, policy, _WRITTEN_FIELDS, min_scale=required_floor
  )
  scale, count = _writing.get_scale_and_count(caller, policy, state)
  return {
    "scale": scale,
    "growth_factor": float(dynamic_policy.growth_factor),
    "backoff_factor": float(dynamic_policy.backoff_factor),
    "growth_interval": int(dynamic_policy.growth_interval),
    "_growth_tracker": _writing.clamp_count(
      count, dynamic_policy.growth_interval
    ),
  }
