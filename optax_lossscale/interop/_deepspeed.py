"""DeepSpeed's loss scaler, by its rule before and since version 0.17.1.

Read at the tags v0.3.0, v0.7.7, v0.8.0, v0.9.2, v0.9.3, v0.16.9, v0.17.0 and
v0.17.1 of deepspeedai/DeepSpeed, in `deepspeed/runtime`: `config.py` and
`constants.py` (since 0.17.1 `precision_config.py`), `fp16/loss_scaler.py`,
`zero/stage_1_and_2.py` and `zero/stage3.py`. Up to 0.17.0, ZeRO gives its
`DynamicLossScaler` the settings of the block only if one of those that are
about a dynamic scale is in it. Otherwise the scaler has the defaults of its
class, with a first scale of 2**32 and no hysteresis. `initial_scale_power` was
32 by default before 0.8.0, and `consecutive_hysteresis` was not read before
0.9.3.
"""

import re
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._loss_scales import DeepSpeedLossScale
from optax_lossscale.interop._reading import FieldSpec

# The defaults depend on the version: see `_with_defaults`.
_FP16 = {
  "enabled": FieldSpec("enabled", True),
  "loss_scale": FieldSpec("scale_or_zero", 0.0),
  "initial_scale_power": FieldSpec("exponent", None),
  "loss_scale_window": FieldSpec("growth_interval", None),
  "hysteresis": FieldSpec("hysteresis", None),
  "consecutive_hysteresis": FieldSpec("consecutive_hysteresis", None),
  "min_loss_scale": FieldSpec("min_scale", None),
}
_FP16_IGNORED = ("auto_cast", "fp16_master_weights_and_grads")
_STATE = {
  "cur_scale": FieldSpec("loss_scale"),
  "cur_iter": FieldSpec("step"),
  "last_overflow_iter": FieldSpec("overflow_step"),
  "cur_hysteresis": FieldSpec("hysteresis_remaining"),
}
# The settings that the scaler may hold as well.
_SETTING_FIELDS = {
  "scale_factor": "growth_factor",
  "scale_window": "growth_interval",
  "min_scale": "min_scale",
  "delayed_shift": "hysteresis",
  "consecutive_hysteresis": "consecutive_hysteresis",
}
_STATE_IGNORED = ("raise_error_at_min_scale", "dtype")
_NEW_RULE_VERSION = 0, 17, 1  # the version since which it holds


@_transfer_guard.allow_transfers
def from_deepspeed(
  fp16: Any, state: Any = None, version: str = "0.17.3"
) -> _results.PolicyAndState:
  """The policy and state of DeepSpeed's `DynamicLossScaler`.

  Up to version 0.17.0 it doubles the scale on every W-th finite step. Since
  0.17.1 it first doubles it on the (W+1)-th finite step after a start or an
  overflow, and then on every W-th. It halves the scale on the `hysteresis`-th
  overflow and on each that follows, until a growth (or, with
  `consecutive_hysteresis`, a finite step) refills the hysteresis. DeepSpeed
  raises an error at its floor. Ours stays there, and
  :func:`~optax_lossscale.raise_if_stuck` raises an error if you call it.

  Args:
    fp16: the `fp16` block of a DeepSpeed config. Settings left out have
      DeepSpeed's defaults: `loss_scale` 0 (dynamic; a number is a fixed scale),
      `initial_scale_power` 16 (32 before 0.8.0), `loss_scale_window` 1000,
      `hysteresis` 2, `consecutive_hysteresis` False (read since 0.9.3),
      `min_loss_scale` 1. If all of these but `loss_scale` are left out, the
      power is 32 and the hysteresis 1 up to 0.17.0, as ZeRO has it.
      `enabled: false` gives `FixedLossScale(1.0)`; left out, it counts as true.
    state: the scaler, as a ZeRO checkpoint holds it under `loss_scaler`, or a
      dict of its attributes: `cur_scale`, `cur_iter`, `last_overflow_iter` and
      (unless the hysteresis is 1) `cur_hysteresis`; `cur_scale` alone of a
      fixed scale. Settings in it must agree with the block.
    version: the version of DeepSpeed whose rule is meant, such as "0.16.9".

  Returns:
    `(policy, state)`: a :class:`~optax_lossscale.DynamicLossScale` for the old
    rule, a :class:`DeepSpeedLossScale` for the new one.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> block = {"enabled": True, "loss_scale_window": 500, "hysteresis": 1}
    >>> policy, state = interop.from_deepspeed(block, version="0.16.9")
    >>> type(policy).__name__, policy.growth_interval
    ('DynamicLossScale', 500)
  """
  caller, version_numbers = "from_deepspeed", _parse_version(version)
  fp16_fields = _reading.read_fields(caller, "fp16", fp16, _FP16, _FP16_IGNORED)
  values = _fill_defaults(fp16_fields, version_numbers)
  fixed_scale = values["scale_or_zero"] if values["enabled"] else 1.0
  if fixed_scale:
    if state is not None:
      _check_fixed_state(caller, fixed_scale, state)
    return _results.fixed_result(fixed_scale)
  policy = _make_policy(values, version_numbers >= _NEW_RULE_VERSION)
  if state is None:
    return _results.initial_result(policy)
  return _make_resumed_result(
    caller, policy, values | _read_dynamic_state(caller, values, state)
  )


def _fill_defaults(
  fp16_fields: dict[str, Any], version: tuple[int, ...]
) -> dict[str, Any]:
  """The settings of the block, and the defaults of this version."""
  if version < (0, 9, 3):
    fp16_fields = {**fp16_fields, "consecutive_hysteresis": None}
  explicit_fields = {
    field: value for field, value in fp16_fields.items() if value is not None
  }
  is_old_rule = version < _NEW_RULE_VERSION
  has_class_defaults = is_old_rule and explicit_fields.keys() <= {
    "enabled",
    "scale_or_zero",
  }
  return {
    "exponent": 32 if has_class_defaults or version < (0, 8) else 16,
    "growth_factor": 2.0,
    "growth_interval": 1000,
    "hysteresis": 1 if has_class_defaults else 2,
    "consecutive_hysteresis": False,
    "min_scale": 1.0,
    **explicit_fields,
  }


def _make_policy(
  values: dict[str, Any], is_new_rule: bool
) -> _policies.LossScalePolicy:
  init_scale = 2.0 ** values["exponent"]
  if not is_new_rule:
    refill = "finite" if values["consecutive_hysteresis"] else "growth"
    return _results.make_dynamic_policy(
      values, init_scale=init_scale, hysteresis_refill=refill
    )
  return DeepSpeedLossScale(
    init_scale,
    values["growth_interval"],
    values["min_scale"],
    values["hysteresis"],
    values["consecutive_hysteresis"],
  )


def _check_fixed_state(caller: str, scale: float, state: Any) -> None:
  """Raises unless the state is that of this fixed scale."""
  expected_settings = {
    "cur_scale": ("scale", scale),
    "dynamic": ("dynamic", False),
  }
  state_specs = {"cur_scale": FieldSpec("scale")}
  _read_state(
    caller, "state of a fixed scale", state, state_specs, expected_settings
  )


def _read_dynamic_state(
  caller: str, settings: dict[str, Any], state: Any
) -> dict[str, Any]:
  """The values of the scaler of a scale that moves."""
  expected_settings = {
    key: (field, settings[field]) for key, field in _SETTING_FIELDS.items()
  }
  expected_settings["dynamic"] = "dynamic", True
  state_specs = dict(_STATE)
  if settings["hysteresis"] == 1:  # Scalers without hysteresis have no such.
    state_specs["cur_hysteresis"] = FieldSpec("hysteresis_remaining", 1)
  values = _read_state(caller, "state", state, state_specs, expected_settings)
  if values["overflow_step"] >= values["step"]:
    raise ValueError(
      "from_deepspeed: last_overflow_iter in state must be less than cur_iter,"
      f" {values['step']}, got {values['overflow_step']}."
    )
  return values


def _read_state(
  caller: str,
  source_name: str,
  state: Any,
  state_specs: dict[str, FieldSpec],
  expected_settings: dict[str, tuple[str, Any]],
) -> dict[str, Any]:
  """The values of a scaler, checked to have the settings of the block."""
  setting_specs = {
    key: FieldSpec(*setting) for key, setting in expected_settings.items()
  }
  specs = {**setting_specs, **state_specs}
  values = _reading.read_fields(
    caller, source_name, state, specs, _STATE_IGNORED
  )
  for key, (field, expected) in expected_settings.items():
    if values[field] != expected:
      raise ValueError(
        f"from_deepspeed: {key} in {source_name} must be {expected}, as in the fp16"
        f" block, got {values[field]}."
      )
  return values


def _make_resumed_result(
  caller: str, policy: _policies.LossScalePolicy, values: dict[str, Any]
) -> _results.PolicyAndState:
  """The policy, and its state as the scaler stands."""
  # Finite steps since the last overflow; the iteration of the start is -1.
  finite_steps = values["step"] - values["overflow_step"] - 1
  growth_interval = values["growth_interval"]
  # The new rule grows a step late at first; the count restarts at each growth.
  extra_steps = 1 if isinstance(policy, DeepSpeedLossScale) else 0
  has_grown = finite_steps >= growth_interval + extra_steps
  finite_count = (
    (finite_steps - extra_steps) % growth_interval
    if has_grown
    else finite_steps
  )
  values = {**values, "finite_count": finite_count}
  policy, state = _results.resumed_result(caller, policy, values)
  if extra_steps:
    policy_state = state.policy_state._replace(
      has_grown=jnp.asarray(has_grown, jnp.bool_)
    )
    state = state._replace(policy_state=policy_state)
  return policy, state


def _parse_version(version: Any) -> tuple[int, ...]:
  """The numbers of a version: (0, 17, 3) of 0.17.3+cpu."""
  pattern = r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?!\d)"
  is_str = isinstance(version, str)
  match = re.match(pattern, version) if is_str else None
  if not match:
    raise (ValueError if is_str else TypeError)(
      "from_deepspeed: version must be a DeepSpeed release, such as"
      f" '0.17.3', got version = {_reading.safe_repr(version)}."
    )
  return tuple(int(part or 0) for part in match.groups())
