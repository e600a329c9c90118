"""Megatron's grad scalers."""

from typing import Any

from optax_lossscale import _policies
from optax_lossscale.interop import _reading, _results

_SETTINGS = {
  "loss_scale": None,
  "initial_loss_scale": 2.0**32,
  "min_loss_scale": 1.0,
  "loss_scale_window": 1000,
  "hysteresis": 2,
}
_STATE = ("scale", "growth_tracker", "hysteresis_tracker")


def from_megatron(settings: Any, state_dict: Any = None) -> _results.Result:
  """The policy and state of Megatron's `DynamicGradScaler`.

  It doubles the scale on the N-th finite step, and halves it on the
  `hysteresis`-th overflow since the last growth and on each that follows. It
  has no ceiling, and may become inf. Ours has the ceiling 2**126.

  Args:
    settings: a dict of Megatron's arguments, or the object that holds them
      (its `args`, or an `OptimizerConfig`; its other attributes are left
      alone): `loss_scale` (None; a number is a fixed scale),
      `initial_loss_scale` (2**32), `min_loss_scale` (1), `loss_scale_window`
      (1000) and `hysteresis` (2).
    state_dict: `{"scale", "growth_tracker", "hysteresis_tracker"}`, with the
      scale as a number or an array of one element; that of a fixed scale is
      empty.

  Returns:
    `(policy, state)`; the initial state without a state dict.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_megatron({"loss_scale_window": 500})
    >>> policy.growth_interval, state.memory.hysteresis_left.item()
    (500, 2)
  """
  name = "from_megatron"
  options = _reading.read_either(name, "settings", settings, _SETTINGS)
  options = options.without_none()
  if "loss_scale" in options:
    fixed = _results.fixed(options.scale("loss_scale"))
    if state_dict is not None:
      what = "the state dict of a fixed scale"
      _reading.read_mapping(name, what, state_dict, ())
    return fixed
  floor = options.scale("min_loss_scale")
  policy = _policies.DynamicLossScale(
    init_scale=options.scale("initial_loss_scale", floor),
    growth_interval=options.count("loss_scale_window"),
    min_scale=floor,
    hysteresis=options.count("hysteresis"),
    hysteresis_refill="growth",
  )
  if state_dict is None:
    return _results.start(policy)
  values = _reading.read_mapping(name, "state_dict", state_dict, _STATE)
  values.complete()
  left = values.hysteresis_left("hysteresis_tracker", policy.hysteresis)
  return _results.resume(policy, values, "scale", "growth_tracker", left)
