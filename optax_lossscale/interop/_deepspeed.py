"""DeepSpeed's loss scaler, by its rule before and since version 0.17.1."""

import re
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _policies
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import Key
from optax_lossscale.interop._rules import DeepSpeedLossScale

_FP16 = {
  "enabled": Key("enabled", True),
  "loss_scale": Key("scale_or_zero", 0.0),
  "initial_scale_power": Key("exponent", 16),
  "loss_scale_window": Key("growth_interval", 1000),
  "hysteresis": Key("hysteresis", 2),
  "consecutive_hysteresis": Key("consecutive_hysteresis", False),
  "min_loss_scale": Key("min_scale", 1.0),
}
_FP16_IGNORED = ("auto_cast", "fp16_master_weights_and_grads")
_STATE = {
  "cur_scale": Key("loss_scale"),
  "cur_iter": Key("step"),
  "last_overflow_iter": Key("overflow_step"),
  "cur_hysteresis": Key("hysteresis_left"),
}
# The settings that the scaler may hold as well.
_SETTINGS = {
  "scale_factor": "growth_factor",
  "scale_window": "growth_interval",
  "min_scale": "min_scale",
  "delayed_shift": "hysteresis",
  "consecutive_hysteresis": "consecutive_hysteresis",
}
_STATE_IGNORED = ("dynamic", "raise_error_at_min_scale", "dtype")


def from_deepspeed(
  fp16: Any, state: Any = None, version: str = "0.17.3"
) -> _results.Result:
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
      `initial_scale_power` 16, `loss_scale_window` 1000, `hysteresis` 2,
      `consecutive_hysteresis` False, `min_loss_scale` 1. `enabled: false` gives
      `FixedLossScale(1.0)`; left out, it counts as true.
    state: the scaler, as a ZeRO checkpoint holds it under `loss_scaler`, or a
      dict of its attributes: `cur_scale`, `cur_iter`, `last_overflow_iter` and
      (unless the hysteresis is 1) `cur_hysteresis`. Settings in it must agree
      with the block.
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
  name = "from_deepspeed"
  values = _reading.read(name, "fp16", fp16, _FP16, _FP16_IGNORED)
  is_new = _version(version) >= (0, 17, 1)
  if not values["enabled"]:
    return _results.fixed(1.0)
  if values["scale_or_zero"]:
    return _results.fixed(values["scale_or_zero"])
  values["growth_factor"] = 2.0
  policy = _policy(values, is_new)
  if state is None:
    return _results.start(policy)
  return _resumed(name, policy, values | _read_state(name, values, state))


def _policy(values: dict[str, Any], is_new: bool) -> _policies.LossScalePolicy:
  start = 2.0 ** values["exponent"]
  if not is_new:
    refill = "finite" if values["consecutive_hysteresis"] else "growth"
    return _results.dynamic(values, init_scale=start, hysteresis_refill=refill)
  return DeepSpeedLossScale(
    start,
    values["growth_interval"],
    values["min_scale"],
    values["hysteresis"],
    values["consecutive_hysteresis"],
  )


def _read_state(
  name: str, settings: dict[str, Any], state: Any
) -> dict[str, Any]:
  """The values of the scaler, checked to have the settings of the block."""
  same = {key: Key(word, settings[word]) for key, word in _SETTINGS.items()}
  known = {**_STATE, **same}
  if settings["hysteresis"] == 1:  # Scalers without hysteresis have no such.
    known["cur_hysteresis"] = Key("hysteresis_left", 1)
  values = _reading.read(name, "state", state, known, _STATE_IGNORED)
  for key, (word, expected) in same.items():
    if values[word] != expected:
      raise ValueError(
        f"from_deepspeed: {key} in state must be {expected}, as in the fp16"
        f" block, got {values[word]}."
      )
  if values["overflow_step"] >= values["step"]:
    raise ValueError(
      "from_deepspeed: last_overflow_iter in state must be less than cur_iter,"
      f" {values['step']}, got {values['overflow_step']}."
    )
  return values


def _resumed(
  name: str, policy: _policies.LossScalePolicy, values: dict[str, Any]
) -> _results.Result:
  """The policy, and its state as the scaler stands."""
  # Finite steps since the last overflow; the iteration of the start is -1.
  finite = values["step"] - values["overflow_step"] - 1
  window = values["growth_interval"]
  # The new rule grows a step late at first; the count restarts at each growth.
  late = 1 if isinstance(policy, DeepSpeedLossScale) else 0
  grown = finite >= window + late
  count = (finite - late) % window if grown else finite
  values = {**values, "finite_count": count}
  policy, state = _results.resume(name, policy, values)
  if late:
    memory = state.memory._replace(grown=jnp.asarray(grown, jnp.bool_))
    state = state._replace(memory=memory)
  return policy, state


def _version(version: Any) -> tuple[int, ...]:
  """The numbers of a version: (0, 17, 3) of 0.17.3+cpu."""
  numbers = r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?!\d)"
  is_text = isinstance(version, str)
  match = re.match(numbers, version) if is_text else None
  if not match:
    raise (ValueError if is_text else TypeError)(
      "from_deepspeed: version must be that of a DeepSpeed release, such as"
      f" '0.17.3', got version = {_reading.show(version)}."
    )
  return tuple(int(part or 0) for part in match.groups())
