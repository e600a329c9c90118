"""DeepSpeed's loss scaler, by its rule before and since version 0.17.1."""

import re
from typing import Any

import jax.numpy as jnp

from optax_lossscale import _checks, _policies
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._rules import DeepSpeedLossScale

_Policy = _policies.DynamicLossScale | DeepSpeedLossScale

_FP16 = {
  "enabled": True,
  "loss_scale": 0.0,
  "initial_scale_power": 16,
  "loss_scale_window": 1000,
  "hysteresis": 2,
  "consecutive_hysteresis": False,
  "min_loss_scale": 1.0,
}
_FP16_IGNORED = ("auto_cast", "fp16_master_weights_and_grads")
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_STATE_IGNORED = ("dynamic", "raise_error_at_min_scale", "dtype")
_FIRST_NEW_VERSION = (0, 17, 1)


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
  options = _reading.read_mapping(
    "from_deepspeed", "fp16", fp16, _FP16, _FP16_IGNORED
  )
  is_new = _version(version) >= _FIRST_NEW_VERSION
  if not options.boolean("enabled"):
    return _results.fixed(1.0)
  if options.number("loss_scale", 0.0, _checks.LARGEST_SCALE):
    return _results.fixed(options.scale("loss_scale"))
  policy = _policy(options, is_new)
  if state is None:
    return _results.start(policy)
  return _resumed(policy, _read_state(policy, options, state))


def _policy(options: _reading.Values, is_new: bool) -> _Policy:
  floor = options.scale("min_loss_scale")
  scale = 2.0 ** options.integer("initial_scale_power", 0, 126)
  if scale < floor:
    rule = f"at most the initial scale, {_checks.show_bound(scale)}"
    options.fail("min_loss_scale", rule, ValueError)
  window = options.count("loss_scale_window")
  hysteresis = options.count("hysteresis")
  consecutive = options.boolean("consecutive_hysteresis")
  if is_new:
    return DeepSpeedLossScale(scale, window, floor, hysteresis, consecutive)
  return _policies.DynamicLossScale(
    init_scale=scale,
    growth_interval=window,
    min_scale=floor,
    hysteresis=hysteresis,
    hysteresis_refill="finite" if consecutive else "growth",
  )


def _read_state(
  policy: _Policy, options: _reading.Values, state: Any
) -> _reading.Values:
  """The values of the scaler, checked to have the settings of the block."""
  # The attributes by which the scaler holds these.
  settings = {
    "scale_factor": 2.0,
    "scale_window": policy.growth_interval,
    "min_scale": policy.min_scale,
    "delayed_shift": policy.hysteresis,
    "consecutive_hysteresis": options.boolean("consecutive_hysteresis"),
  }
  values = _reading.read_either(
    "from_deepspeed", "state", state, (*_STATE, *settings), _STATE_IGNORED
  )
  values.require(*_STATE[:3])
  for key, expected in settings.items():
    if key not in values:
      continue
    if isinstance(expected, bool):
      same = values.boolean(key) == expected
    else:
      same = values.number(key, 0, _checks.LARGEST_SCALE) == expected
    if not same:
      values.fail(key, f"{expected}, as in the fp16 block", ValueError)
  return values


def _resumed(policy: _Policy, values: _reading.Values) -> _results.Result:
  """The policy, and its state as the scaler stands."""
  left = policy.hysteresis
  if "cur_hysteresis" in values or left > 1:
    values.require("cur_hysteresis")
    left = values.integer("cur_hysteresis", 1, left)
  finite, window = _finite_since_overflow(values), policy.growth_interval
  # The new rule grows a step late at first; the count restarts at each growth.
  late = 1 if isinstance(policy, DeepSpeedLossScale) else 0
  grown = finite >= window + late
  count = (finite - late) % window if grown else finite
  policy, state = _results.resume(policy, values, "cur_scale", left=left)
  state = state._replace(finite_count=jnp.asarray(count, jnp.int32))
  if late:
    memory = state.memory._replace(grown=jnp.asarray(grown, jnp.bool_))
    state = state._replace(memory=memory)
  return policy, state


def _finite_since_overflow(values: _reading.Values) -> int:
  """Finite steps since the last overflow; the iteration of the start is -1."""
  step = values.integer("cur_iter", 0, _checks.LARGEST_COUNT)
  overflow = values.integer("last_overflow_iter", -1, _checks.LARGEST_COUNT)
  if overflow >= step:
    values.fail("last_overflow_iter", f"less than cur_iter, {step}", ValueError)
  return step - overflow - 1


def _version(version: Any) -> tuple[int, ...]:
  """The numbers of a version: (0, 17, 3) of 0.17.3+cpu."""
  if not isinstance(version, str):
    raise TypeError(
      "from_deepspeed: version must be a string such as '0.17.3', got"
      f" version = {_reading.show(version)}."
    )
  match = re.match(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?![\d])", version)
  if not match:
    raise ValueError(
      "from_deepspeed: version must be that of a DeepSpeed release, such as"
      f" '0.17.3', got version = {_reading.show(version)}."
    )
  return tuple(int(part or 0) for part in match.groups())
