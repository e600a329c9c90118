"""Imports Megatron's gradient scalers."""

from typing import Any

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import FieldSpec

_SETTINGS = {
  "loss_scale": FieldSpec("scale", None),
  "initial_loss_scale": FieldSpec("init_scale", 2.0**32),
  "min_loss_scale": FieldSpec("min_scale", 1.0),
  "loss_scale_window": FieldSpec("growth_interval", 1000),
  "hysteresis": FieldSpec("hysteresis", 2),
}
_STATE = {
  "scale": FieldSpec("loss_scale"),
  "growth_tracker": FieldSpec("finite_count"),
  "hysteresis_tracker": FieldSpec("hysteresis_remaining"),
}


@_transfer_guard.allow_transfers
def from_megatron(
  settings: Any, state_dict: Any = None
) -> _results.PolicyAndState:
  """The policy and state of Megatron's `DynamicGradScaler`.

  It doubles the scale on the N-th finite step, and halves it on the
  `hysteresis`-th overflow since the last growth and on each overflow after it.
  Its scale is unbounded and may become inf. Our maximum scale is 2**126.

  Args:
    settings: a dict of Megatron's arguments, or the object that holds them
      (its `args`, or an `OptimizerConfig`; its other attributes are
      ignored): `loss_scale` (None; a number is a fixed scale),
      `initial_loss_scale` (2**32), `min_loss_scale` (1), `loss_scale_window`
      (1000) and `hysteresis` (2).
    state_dict: `{"scale", "growth_tracker", "hysteresis_tracker"}`, with the
      scale as a number or an array of one element; empty for a fixed scale.

  Returns:
    `(policy, state)`; the initial state without a state dict.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_megatron({"loss_scale_window": 500})
    >>> policy.growth_interval, state.policy_state.hysteresis_remaining.item()
    (500, 2)
  """
  caller, source_name = "from_megatron", "state_dict"
  values = _reading.read_fields(caller, "settings", settings, _SETTINGS)
  if values["scale"] is not None:
    fixed_state = {} if state_dict is None else state_dict
    _reading.read_fields(
      caller, f"{source_name} of a fixed scale", fixed_state, {}
    )
    return _results.initial_result(_policies.FixedLossScale(values["scale"]))
  policy = _results.make_dynamic_policy(values, hysteresis_refill="growth")
  if state_dict is None:
    return _results.initial_result(policy)
  values |= _reading.read_fields(caller, source_name, state_dict, _STATE)
  return _results.resumed_result(caller, policy, values)
