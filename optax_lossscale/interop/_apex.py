"""Imports the loss scaler of apex.amp, and apex's hysteresis kernel."""

from collections.abc import Mapping
import functools
from typing import Any

from optax_lossscale import _checks, _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import FieldSpec

_AMP_SETTINGS = {
  "loss_scale": FieldSpec("scale_or_dynamic", "dynamic"),
  "init_scale": FieldSpec("init_scale", 2.0**16),
  "scale_window": FieldSpec("growth_interval", 2000),
  "min_loss_scale": FieldSpec("min_scale", _checks.MIN_LOSS_SCALE),
  "max_loss_scale": FieldSpec("max_scale", 2.0**24),
  "loss_id": FieldSpec("loss_id", None),
}
_AMP_STATE = {
  "loss_scale": FieldSpec("loss_scale"),
  "unskipped": FieldSpec("finite_count"),
}
_KERNEL_SETTINGS = {
  "growth_factor": FieldSpec("growth_factor"),
  "backoff_factor": FieldSpec("backoff_factor"),
  "growth_interval": FieldSpec("growth_interval"),
  "hysteresis": FieldSpec("hysteresis"),
}
_KERNEL_STATE = {
  "current_scale": FieldSpec("loss_scale"),
  "growth_tracker": FieldSpec("finite_count"),
  "hysteresis_tracker": FieldSpec("hysteresis_remaining"),
}

_read_fields = functools.partial(_reading.read_fields, "from_apex")


@_transfer_guard.allow_transfers
def from_apex(state_dict: Any, **settings: Any) -> _results.PolicyAndState:
  """The policy and state of apex.amp, or of apex's hysteresis kernel.

  amp doubles the scale on the N-th finite step, up to `max_loss_scale`, and
  halves it on every overflow. The kernel `update_scale_hysteresis` halves it on
  the `hysteresis`-th overflow without a finite step in between, and on each
  further overflow until the next finite step.

  Args:
    state_dict: `amp.state_dict()`; empty for the state before the first step.
      Or the three tensors of the kernel, by name: `current_scale`,
      `growth_tracker` and `hysteresis_tracker`.
    **settings: for amp: `loss_scale` (`"dynamic"` or a number), `init_scale`
      (2**16), `scale_window` (2000), `min_loss_scale` (None: no minimum) and
      `max_loss_scale` (2**24), which are not in the state dict; and, with
      several losses, `loss_id`. For the kernel, which has no defaults:
      `growth_factor`, `backoff_factor`, `growth_interval` and `hysteresis`.

  Returns:
    `(policy, state)`.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_apex(
    ...     {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}},
    ...     min_loss_scale=8.0)
    >>> policy.min_scale, policy.max_scale, state.finite_count.item()
    (8.0, 16777216.0, 7)
  """
  if not isinstance(state_dict, Mapping):
    raise TypeError(
      "from_apex: state_dict must be a dict, as amp.state_dict() returns it,"
      f" got {_reading.safe_repr(state_dict)}."
    )
  if any(key in state_dict for key in _KERNEL_STATE):
    values = _read_fields("the tensors", state_dict, _KERNEL_STATE)
    values |= _read_fields("settings", settings, _KERNEL_SETTINGS)
    policy = _results.make_dynamic_policy(values, hysteresis_refill="finite")
    return _results.resumed_result("from_apex", policy, values)
  values = _read_fields("settings", settings, _AMP_SETTINGS)
  amp_policy = _make_amp_policy(values)
  if not state_dict:
    return _results.initial_result(amp_policy)
  values |= _select_scaler(state_dict, values["loss_id"])
  return _results.resumed_result("from_apex", amp_policy, values)


def _make_amp_policy(values: dict[str, Any]) -> _policies.LossScalePolicy:
  """Return the policy of the settings of apex.amp."""
  loss_scale = values["scale_or_dynamic"]
  if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
    coerce_args = "from_apex", "settings", "loss_scale", loss_scale
    return _policies.FixedLossScale(
      _reading.check_and_convert_field(*coerce_args, "scale")
    )
  # amp clamps an initial scale above the maximum, too.
  init_scale = min(values["init_scale"], values["max_scale"])
  return _results.make_dynamic_policy(values, init_scale=init_scale)


def _select_scaler(
  state_dict: Mapping[str, Any], loss_id: int | None
) -> dict[str, Any]:
  """Return the fields of the scaler of the chosen loss."""
  num_scalers = len(state_dict)
  if loss_id is None and num_scalers > 1:
    raise ValueError(
      f"from_apex: state_dict holds the scales of {num_scalers} losses. Choose"
      f" one with loss_id, an integer in [0, {num_scalers - 1}]."
    )
  scaler_name = f"loss_scaler{loss_id or 0}"
  other_keys = [key for key in state_dict if key != scaler_name]
  scalers = _read_fields(
    "state_dict", state_dict, {scaler_name: FieldSpec("scaler")}, other_keys
  )
  return _read_fields(scaler_name, scalers["scaler"], _AMP_STATE)
