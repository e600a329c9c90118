"""Megatron's grad scalers."""

from typing import Any

import jax.numpy as jnp

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

_SETTINGS = (
  "loss_scale",
  "initial_loss_scale",
  "min_loss_scale",
  "loss_scale_window",
  "hysteresis",
)
_STATE = ("scale", "growth_tracker", "hysteresis_tracker")


def from_megatron(
  settings: Any, state_dict: Any = None
) -> tuple[_policies.LossScalePolicy, _state.LossScaleState]:
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
    fixed = _policies.FixedLossScale(options.scale("loss_scale"))
    if state_dict is not None:
      what = "the state dict of a fixed scale"
      _reading.read_mapping(name, what, state_dict, ())
    return fixed, fixed.init()
  policy = _dynamic(options)
  if state_dict is None:
    return policy, policy.init()
  values = _reading.read_mapping(name, "state_dict", state_dict, _STATE)
  values.require(*_STATE)
  # Megatron goes on counting below zero. Ours stops at zero, which has the same
  # effect.
  left = values.integer(
    "hysteresis_tracker", -_checks.LARGEST_COUNT, policy.hysteresis
  )
  state = _reading.state_at(
    policy,
    values,
    scale="scale",
    count="growth_tracker",
    memory=_policies.DynamicMemory(jnp.asarray(max(left, 0), jnp.int32)),
  )
  return policy, state


def _dynamic(options: _reading.Values) -> _policies.DynamicLossScale:
  floor = options.scale("min_loss_scale", 1.0)
  return _policies.DynamicLossScale(
    init_scale=options.number(
      "initial_loss_scale", floor, _checks.LARGEST_SCALE, max(floor, 2.0**32)
    ),
    growth_interval=options.count("loss_scale_window", 1000),
    min_scale=floor,
    hysteresis=options.count("hysteresis", 2),
    hysteresis_refill="growth",
  )
