"""apex.amp, and apex's fused update of a scale with hysteresis."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

_Result = tuple[_policies.LossScalePolicy, _state.LossScaleState]

_AMP_SETTINGS = (
  "loss_scale",
  "init_scale",
  "scale_window",
  "min_loss_scale",
  "max_loss_scale",
  "loss_id",
)
_AMP_STATE = ("loss_scale", "unskipped")
_KERNEL_SETTINGS = (
  "growth_factor",
  "backoff_factor",
  "growth_interval",
  "hysteresis",
)
_KERNEL_STATE = ("current_scale", "growth_tracker", "hysteresis_tracker")


def from_apex(state_dict: Any, **settings: Any) -> _Result:
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


def _from_amp(state_dict: Any, settings: dict[str, Any]) -> _Result:
  options = _read("settings", settings, _AMP_SETTINGS)
  policy = _amp_policy(options)
  scaler = _chosen_scaler(state_dict, options)
  if scaler is None:
    return policy, policy.init()
  scaler.require(*_AMP_STATE)
  state = _reading.state_at(
    policy, scaler, scale="loss_scale", count="unskipped"
  )
  return policy, state


def _amp_policy(options: _reading.Values) -> _policies.LossScalePolicy:
  scale = options.found.get("loss_scale", "dynamic")
  if not (isinstance(scale, str) and scale == "dynamic"):
    return _policies.FixedLossScale(options.scale("loss_scale"))
  options = options.without_none()
  low = options.scale("min_loss_scale", _checks.SMALLEST_SCALE)
  high = options.number(
    "max_loss_scale", low, _checks.LARGEST_SCALE, max(low, 2.0**24)
  )
  # amp, too, starts at the ceiling if its initial scale is above.
  start = min(high, options.scale("init_scale", max(low, 2.0**16)))
  if start < low:
    options.fail("init_scale", "at least min_loss_scale", ValueError)
  return _policies.DynamicLossScale(
    init_scale=start,
    growth_interval=options.count("scale_window", 2000),
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
  names = [f"loss_scaler{i}" for i in range(min(count, 64))]
  values = _read("state_dict", state_dict, names or ("loss_scaler0",))
  if not count:
    return None
  if count > 1 and "loss_id" not in options:
    raise ValueError(
      f"from_apex: state_dict holds the scales of {count} losses; choose one"
      f" with loss_id, an integer in [0, {count - 1}]."
    )
  chosen = names[options.integer("loss_id", 0, count - 1, 0)]
  return _read(chosen, values.found[chosen], _AMP_STATE)


def _from_kernel(tensors: Any, settings: dict[str, Any]) -> _Result:
  values = _read("the tensors", tensors, _KERNEL_STATE)
  values.require(*_KERNEL_STATE)
  options = _read("settings", settings, _KERNEL_SETTINGS)
  options.require(*_KERNEL_SETTINGS)
  hysteresis = options.count("hysteresis")
  policy = _policies.DynamicLossScale(
    init_scale=values.scale("current_scale"),
    growth_factor=options.growth("growth_factor"),
    backoff_factor=options.backoff("backoff_factor"),
    growth_interval=options.count("growth_interval"),
    min_scale=_checks.SMALLEST_SCALE,
    hysteresis=hysteresis,
    hysteresis_refill="finite",
  )
  # The kernel goes on counting below zero. Ours stops at zero, which has the
  # same effect.
  left = values.integer(
    "hysteresis_tracker", -_checks.LARGEST_COUNT, hysteresis
  )
  state = _reading.state_at(
    policy,
    values,
    scale="current_scale",
    count="growth_tracker",
    memory=_policies.DynamicMemory(jnp.asarray(max(left, 0), jnp.int32)),
  )
  return policy, state


def _read(what: str, source: Any, known: Collection[str]) -> _reading.Values:
  return _reading.read_mapping("from_apex", what, source, known)
