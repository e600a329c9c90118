"""apex.amp, and apex's fused update of a scale with hysteresis."""

from collections.abc import Mapping
import functools
from typing import Any

from optax_lossscale import _checks, _policies
from optax_lossscale.interop import _reading, _results

_AMP_SETTINGS = {
  "loss_scale": "dynamic",
  "init_scale": 2.0**16,
  "scale_window": 2000,
  "min_loss_scale": _checks.SMALLEST_SCALE,
  "max_loss_scale": 2.0**24,
  "loss_id": 0,
}
_AMP_STATE = ("loss_scale", "unskipped")
_KERNEL_SETTINGS = (
  "growth_factor",
  "backoff_factor",
  "growth_interval",
  "hysteresis",
)
_KERNEL_STATE = ("current_scale", "growth_tracker", "hysteresis_tracker")

_read = functools.partial(_reading.read_mapping, "from_apex")


def from_apex(state_dict: Any, **settings: Any) -> _results.Result:
  """The policy and state of apex.amp, or of apex's hysteresis kernel.

  amp doubles the scale on the N-th finite step, up to a ceiling, and halves it
  on every overflow. The kernel `update_scale_hysteresis` halves it on the
  `hysteresis`-th overflow without a finite step in between, and on each further
  one until the next finite step.

  Args:
    state_dict: `amp.state_dict()`; empty for the state before the first step.
      Or the three tensors of the kernel, by name: `current_scale`,
      `growth_tracker` and `hysteresis_tracker`.
    **settings: of amp: `loss_scale` (`"dynamic"` or a number), `init_scale`
      (2**16), `scale_window` (2000), `min_loss_scale` (None: no floor) and
      `max_loss_scale` (2**24), which are not in the state dict; and, with
      several losses, `loss_id`. Of the kernel, which has no defaults:
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
  is_mapping = isinstance(state_dict, Mapping)
  if is_mapping and any(key in state_dict for key in _KERNEL_STATE):
    return _from_kernel(state_dict, settings)
  return _from_amp(state_dict, settings)


def _from_amp(state_dict: Any, settings: dict[str, Any]) -> _results.Result:
  options = _read("settings", settings, _AMP_SETTINGS)
  policy = _amp_policy(options)
  scaler = _chosen_scaler(state_dict, options)
  if scaler is None:
    return _results.start(policy)
  return _results.resume(policy, scaler.complete(), "loss_scale", "unskipped")


def _amp_policy(options: _reading.Values) -> _policies.LossScalePolicy:
  scale = options.found.get("loss_scale", "dynamic")
  if not (isinstance(scale, str) and scale == "dynamic"):
    return _policies.FixedLossScale(options.scale("loss_scale"))
  options = options.without_none()
  low = options.scale("min_loss_scale")
  high = options.scale("max_loss_scale", low)
  start = options.scale("init_scale")
  if start < low and "init_scale" in options:
    options.fail("init_scale", "at least min_loss_scale", ValueError)
  return _policies.DynamicLossScale(
    # amp, too, starts at the ceiling if its initial scale is above. Its default
    # may be below the floor.
    init_scale=min(max(start, low), high),
    growth_interval=options.count("scale_window"),
    min_scale=low,
    max_scale=high,
  )


def _chosen_scaler(
  state_dict: Any, options: _reading.Values
) -> _reading.Values | None:
  """The values of the one scaler that is meant; None in an empty state dict."""
  if not isinstance(state_dict, Mapping):
    raise TypeError(
      "from_apex: state_dict must be a dict, as amp.state_dict() returns it,"
      f" got {_reading.show(state_dict)}."
    )
  count = len(state_dict)
  if not count:
    return None
  names = [f"loss_scaler{i}" for i in range(min(count, 64))]
  values = _read("state_dict", state_dict, names)
  if count > 1 and "loss_id" not in options:
    raise ValueError(
      f"from_apex: state_dict holds the scales of {count} losses; choose one"
      f" with loss_id, an integer in [0, {count - 1}]."
    )
  chosen = names[options.integer("loss_id", 0, count - 1)]
  return _read(chosen, values.found[chosen], _AMP_STATE)


def _from_kernel(tensors: Any, settings: dict[str, Any]) -> _results.Result:
  values = _read("the tensors", tensors, _KERNEL_STATE).complete()
  options = _read("settings", settings, _KERNEL_SETTINGS).complete()
  policy = _policies.DynamicLossScale(
    hysteresis=options.count("hysteresis"),
    hysteresis_refill="finite",
    init_scale=values.scale("current_scale"),
    growth_factor=options.growth("growth_factor"),
    backoff_factor=options.backoff("backoff_factor"),
    growth_interval=options.count("growth_interval"),
    min_scale=_checks.SMALLEST_SCALE,
  )
  left = values.hysteresis_left("hysteresis_tracker", policy.hysteresis)
  return _results.resume(
    policy, values, "current_scale", "growth_tracker", left
  )
