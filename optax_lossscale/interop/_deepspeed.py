"""Imports DeepSpeed's loss scaler, with its rule before or since 0.17.1.

The sources are the tags v0.3.0, v0.7.7, v0.8.0, v0.9.2, v0.9.3, v0.16.9,
v0.17.0 and v0.17.1 of deepspeedai/DeepSpeed, in `deepspeed/runtime`:
`config.py` and `constants.py` (since 0.17.1 `precision_config.py`),
`fp16/loss_scaler.py`, `zero/stage_1_and_2.py` and `zero/stage3.py`. Up to
0.17.0, ZeRO passes the `fp16` block to its `DynamicLossScaler` only if the
block has a setting of a dynamic scale. Otherwise the scaler has the defaults of
its class, with an initial scale of 2**32 and no hysteresis.
`initial_scale_power` was 32 by default before 0.8.0, and
`consecutive_hysteresis` was not read before 0.9.3.
"""

from collections.abc import Mapping
import re
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._loss_scales import DeepSpeedLossScale
from optax_lossscale.interop._reading import FieldSpec

# The defaults depend on the version: see `_fill_defaults`.
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
# Settings that a saved scaler may hold, too. They must agree with the block.
_SETTING_FIELDS = {
  "scale_factor": "growth_factor",
  "scale_window": "growth_interval",
  "min_scale": "min_scale",
  "delayed_shift": "hysteresis",
  "consecutive_hysteresis": "consecutive_hysteresis",
}
_STATE_IGNORED = ("raise_error_at_min_scale", "dtype")
_NEW_RULE_VERSION = 0, 17, 1  # the first version with the new rule


@_transfer_guard.allow_transfers
def from_deepspeed(
  fp16: Any, state: Any = None, version: str = "0.17.3"
) -> _results.PolicyAndState:
  """The policy and state of DeepSpeed's `DynamicLossScaler`.

  Up to version 0.17.0 it doubles the scale on every W-th finite step. Since
  0.17.1 it first doubles it on the (W+1)-th finite step after a start or an
  overflow, and then on every W-th. It halves the scale on the `hysteresis`-th
  overflow and on each overflow after it, until a growth (or, with
  `consecutive_hysteresis`, a finite step) refills the hysteresis. DeepSpeed
  raises an error at its minimum scale. Our scale stays at the minimum, and
  :func:`~optax_lossscale.raise_if_stuck` raises an error if you call it.

  Args:
    fp16: the `fp16` block of a DeepSpeed config. Settings left out have
      DeepSpeed's defaults: `loss_scale` 0 (dynamic; a number is a fixed scale),
      `initial_scale_power` 16 (32 before 0.8.0), `loss_scale_window` 1000,
      `hysteresis` 2, `consecutive_hysteresis` False (read since 0.9.3),
      `min_loss_scale` 1. If all of these but `loss_scale` are left out, the
      power is 32 and the hysteresis 1 up to 0.17.0, as ZeRO has it.
      `enabled: false` gives `FixedLossScale(1.0)`; left out, it counts as true.
      Replace "auto", which Hugging Face's Trainer resolves, by its value.
    state: the scaler, as a ZeRO checkpoint holds it under `loss_scaler`, or a
      dict of its attributes: `cur_scale`, `cur_iter`, `last_overflow_iter` and
      (unless the hysteresis is 1) `cur_hysteresis`; for a fixed scale, only
      `cur_scale`. Settings in it must agree with the block.
    version: the version of DeepSpeed, which determines the rule, such as
      "0.16.9".

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
  _check_is_fp16_block(caller, fp16)
  _check_no_auto_values(caller, fp16)
  fp16_fields = _reading.read_fields(caller, "fp16", fp16, _FP16, _FP16_IGNORED)
  values = _fill_defaults(fp16_fields, version_numbers)
  fixed_scale = values["scale_or_zero"] if values["enabled"] else 1.0
  if fixed_scale:
    if state is not None:
      _check_fixed_state(caller, fixed_scale, state)
    return _results.initial_result(_policies.FixedLossScale(fixed_scale))
  policy = _make_policy(values, version_numbers >= _NEW_RULE_VERSION)
  if state is None:
    return _results.initial_result(policy)
  return _make_resumed_result(
    caller, policy, values | _read_dynamic_state(caller, values, state)
  )


def _check_is_fp16_block(caller: str, fp16: Any) -> None:
  """Raise if the argument is a whole config."""
  if isinstance(fp16, Mapping) and "fp16" in fp16:
    raise ValueError(
      f"{caller}: fp16 must be the fp16 block of a DeepSpeed config, got a dict"
      " that contains this block. Pass config['fp16']."
    )


def _check_no_auto_values(caller: str, fp16: Any) -> None:
  """Raise if a setting is "auto", which another library resolves."""
  if not isinstance(fp16, Mapping):
    return
  for key in _FP16:
    value = fp16.get(key)
    if isinstance(value, str) and value == "auto":
      raise TypeError(
        f"{caller}: {key} in fp16 must be resolved first, got 'auto'. The"
        " Trainer of Hugging Face replaces 'auto' by its own arguments. Write"
        " the value that it takes: enabled is True with"
        " TrainingArguments(fp16=True). Or leave the key out for DeepSpeed's"
        " default."
      )


def _fill_defaults(
  fp16_fields: dict[str, Any], version: tuple[int, ...]
) -> dict[str, Any]:
  """Return the settings of the block, with the defaults of this version."""
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
  """Return the policy with the rule before or since 0.17.1."""
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
  """Raise unless the state belongs to this fixed scale."""
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
  """Return the fields of a dynamic scaler, with its counts checked."""
  expected_settings = {
    key: (field, settings[field]) for key, field in _SETTING_FIELDS.items()
  }
  expected_settings["dynamic"] = "dynamic", True
  state_specs = dict(_STATE)
  if settings["hysteresis"] == 1:
    # Scalers without hysteresis have no `cur_hysteresis`.
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
  """Return the fields of a scaler, and check that it agrees with the block."""
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
        f"from_deepspeed: {key} in {source_name} must be {expected}, as in the"
        f" fp16 block, got {values[field]}."
      )
  return values


def _make_resumed_result(
  caller: str, policy: _policies.LossScalePolicy, values: dict[str, Any]
) -> _results.PolicyAndState:
  """Return the policy and its state at the scale and counts of the scaler."""
  is_new_rule = isinstance(policy, DeepSpeedLossScale)
  finite_count, has_grown = _count_finite_steps(values, is_new_rule)
  values = {**values, "finite_count": finite_count}
  policy, state = _results.resumed_result(caller, policy, values)
  if is_new_rule:
    policy_state = state.policy_state._replace(
      has_grown=jnp.asarray(has_grown, jnp.bool_)
    )
    state = state._replace(policy_state=policy_state)
  return policy, state


def _count_finite_steps(
  values: dict[str, Any], is_new_rule: bool
) -> tuple[int, bool]:
  """Return the finite steps since the last change, and if that was a growth.

  DeepSpeed stores the step of the last overflow, but our policies count from
  the last growth or overflow.
  """
  # Before the first overflow, `overflow_step` is -1.
  finite_steps = values["step"] - values["overflow_step"] - 1
  interval = values["growth_interval"]
  # With the new rule, the first growth takes one step more.
  extra_steps = 1 if is_new_rule else 0
  has_grown = finite_steps >= interval + extra_steps
  # The count restarts at each growth.
  count = (finite_steps - extra_steps) % interval if has_grown else finite_steps
  return count, has_grown


def _parse_version(version: Any) -> tuple[int, ...]:
  """Return the numbers of a version: (0, 17, 3) for "0.17.3+cpu"."""
  pattern = r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?!\d)"
  is_str = isinstance(version, str)
  match = re.match(pattern, version) if is_str else None
  if not match:
    raise (ValueError if is_str else TypeError)(
      "from_deepspeed: version must be a DeepSpeed release, such as"
      f" '0.17.3', got version = {_reading.safe_repr(version)}."
    )
  return tuple(int(part or 0) for part in match.groups())
