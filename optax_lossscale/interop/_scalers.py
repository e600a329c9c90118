"""Imports and exports the scalers of torch, Flax and jmp.

Lightning and Accelerate use the scaler of torch, too.
"""

from collections.abc import Mapping
from typing import Any

from optax_lossscale import _arrays, _checks, _policies
from optax_lossscale.interop import _fields
from optax_lossscale.interop._fields import FieldSpec

_TORCH_KEYS = {
  "scale": FieldSpec("loss_scale"),
  "growth_factor": FieldSpec("growth_factor"),
  "backoff_factor": FieldSpec("backoff_factor"),
  "growth_interval": FieldSpec("growth_interval"),
  "_growth_tracker": FieldSpec("finite_count"),
}
_TORCH_WRITTEN = "growth_factor", "backoff_factor", "growth_interval"
_FLAX_STATIC_FIELDS = {
  "growth_factor": FieldSpec("growth_factor", 2.0),
  "backoff_factor": FieldSpec("backoff_factor", 0.5),
  "growth_interval": FieldSpec("growth_interval_minus_one", 2000),
  # None is no minimum.
  "minimum_scale": FieldSpec("min_scale", _checks.MIN_LOSS_SCALE),
}
_FLAX_FIELDS = {
  "fin_steps": FieldSpec("finite_count"),
  "scale": FieldSpec("loss_scale"),
  **_FLAX_STATIC_FIELDS,
}
_FLAX_WRITTEN = *_TORCH_WRITTEN, "min_scale"
# The attributes of each class of jmp, by class name.
_JMP_FIELDS = {
  "DynamicLossScale": {
    "loss_scale": FieldSpec("loss_scale"),
    "counter": FieldSpec("finite_count"),
    "period": FieldSpec("growth_interval"),
    "factor": FieldSpec("growth_factor"),
    "min_loss_scale": FieldSpec("min_scale"),
  },
  "StaticLossScale": {"loss_scale": FieldSpec("scale")},
}


@_arrays.allow_transfers
def from_torch(state_dict: Any) -> _fields.PolicyAndState:
  """The policy and state of a `torch.amp.GradScaler`.

  torch raises the scale on the `growth_interval`-th finite step, and has no
  minimum scale. Our minimum is 2**-126, the smallest normal float32 number. The
  maximum of torch is 2**127. Our maximum is 2**126, since the reciprocal of
  2**127 is flushed to zero. torch multiplies by its factors in float64, so the
  scale may differ in the last bit if a factor is not a power of two.

  Args:
    state_dict: `scaler.state_dict()`. The state dict of a disabled scaler is
      empty, and gives `FixedLossScale(1.0)`. This policy skips non-finite
      steps. A disabled scaler applies them, and so does a bare optimizer.

  Returns:
    `(policy, state)`. The state dict holds the current scale and not the
    initial one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_torch({
    ...     "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
    ...     "growth_interval": 2000, "_growth_tracker": 17})
    >>> policy.growth_interval, state.finite_count.item()
    (2000, 17)
  """
  if isinstance(state_dict, Mapping) and not state_dict:
    return _fields.initial_result(_policies.FixedLossScale(1.0))
  if hasattr(type(state_dict), "state_dict"):
    raise TypeError(
      "from_torch: state_dict must be a dict, got an object of type"
      f" {type(state_dict).__name__}. Pass scaler.state_dict()."
    )
  values = _fields.read_fields(
    "from_torch", "state_dict", state_dict, _TORCH_KEYS
  )
  policy = _fields.make_dynamic_policy(values)
  return _fields.resumed_result("from_torch", policy, values)


@_arrays.allow_transfers
def to_torch(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The state dict with which a `GradScaler` continues as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` that torch can express:
      without hysteresis, and with `min_scale` 2**-126 and `max_scale` 2**126,
      which are unbounded; or `FixedLossScale(1.0)`, a disabled scaler.
    state: its state, or a pytree that holds it.

  Returns:
    The argument of `scaler.load_state_dict`; `{}` for a disabled scaler, which
    has nothing to load.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if torch can't express the policy, or the tree has no state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(min_scale=2.0**-126)
    >>> ols.interop.to_torch(policy, policy.init())["scale"]
    32768.0
  """
  caller = "to_torch"
  if isinstance(policy, _policies.FixedLossScale):
    required_scale = 1.0, "a disabled GradScaler has the scale 1"
    _fields.check_hyperparams(caller, policy, (), scale=required_scale)
    return {}
  required_floor = (_checks.MIN_LOSS_SCALE, "it has no minimum scale")
  dynamic_policy = _fields.as_dynamic_policy(
    caller, policy, _TORCH_WRITTEN, min_scale=required_floor
  )
  scale, count = _fields.get_scale_and_count(caller, policy, state)
  return {
    "scale": scale,
    "growth_factor": float(dynamic_policy.growth_factor),
    "backoff_factor": float(dynamic_policy.backoff_factor),
    "growth_interval": int(dynamic_policy.growth_interval),
    "_growth_tracker": _fields.clamp_count(
      count, dynamic_policy.growth_interval
    ),
  }


@_arrays.allow_transfers
def from_flax(dynamic_scale: Any, **static: Any) -> _fields.PolicyAndState:
  """The policy and state of Flax's `DynamicScale`.

  Flax raises the scale on finite step `growth_interval + 1`. So the interval of
  the policy is Flax's interval plus one, and the counter is the same.

  Args:
    dynamic_scale: a `DynamicScale`; or its state dict, which holds `fin_steps`
      and `scale`, and may hold the static fields.
    **static: the static fields that the state dict does not hold:
      `growth_factor`, `backoff_factor`, `growth_interval` and `minimum_scale`.
      Missing fields have Flax's defaults, as in `DynamicScale(**static)`: 2,
      1/2, 2000, and 2**-126. These arguments override the fields of
      `dynamic_scale`.

  Returns:
    `(policy, state)`. A `DynamicScale` holds the current scale and not the
    initial one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from flax.training.dynamic_scale import DynamicScale
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_flax(DynamicScale(growth_interval=1999))
    >>> policy.growth_interval, state.loss_scale.item()
    (2000, 65536.0)
  """
  caller = "from_flax"
  static_specs = {
    key: spec for key, spec in _FLAX_STATIC_FIELDS.items() if key in static
  }
  values = _fields.read_fields(
    caller, "dynamic_scale", dynamic_scale, _FLAX_FIELDS
  )
  values |= _fields.read_fields(
    caller, "the static fields", static, static_specs
  )
  interval = values["growth_interval_minus_one"] + 1
  policy = _fields.make_dynamic_policy(values, growth_interval=interval)
  return _fields.resumed_result(caller, policy, values)


@_arrays.allow_transfers
def to_flax(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The fields of a `DynamicScale` that continues as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` without hysteresis and
      with the `max_scale` 2**126, which is unbounded, since Flax has neither.
    state: its state, or a pytree that holds it.

  Returns:
    The keyword arguments of `DynamicScale(**fields)`. Flax raises the scale one
    step after its interval, so its interval is the policy's minus one.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if Flax can't express the policy, or the tree has no state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(growth_interval=2000)
    >>> ols.interop.to_flax(policy, policy.init())["growth_interval"]
    1999
  """
  caller = "to_flax"
  dynamic_policy = _fields.as_dynamic_policy(
    caller, policy, _FLAX_WRITTEN, "a DynamicLossScale"
  )
  scale, count = _fields.get_scale_and_count(caller, policy, state)
  return {
    "growth_factor": float(dynamic_policy.growth_factor),
    "backoff_factor": float(dynamic_policy.backoff_factor),
    "growth_interval": int(dynamic_policy.growth_interval) - 1,
    "fin_steps": _fields.clamp_count(count, dynamic_policy.growth_interval),
    "scale": scale,
    "minimum_scale": float(dynamic_policy.min_scale),
  }


@_arrays.allow_transfers
def from_jmp(loss_scale: Any) -> _fields.PolicyAndState:
  """The policy and state of a jmp loss scale.

  jmp multiplies the scale by a factor on the N-th finite step, and divides it
  by the same factor on an overflow, down to `min_loss_scale`.

  Args:
    loss_scale: a `DynamicLossScale`, `StaticLossScale` or `NoOpLossScale`. A
      `DynamicLossScale` that has been through `jax.jit` has lost its
      `min_loss_scale`: it is 1 again, and is read as 1.

  Returns:
    `(policy, state)`. The objects hold the current scale and not the initial
    one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if the object is of another class, or an attribute of the wrong
      type.
    ValueError: if an attribute is missing or out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> class StaticLossScale:  # in place of jmp.StaticLossScale
    ...   loss_scale = 128.0
    >>> interop.from_jmp(StaticLossScale())[0]
    FixedLossScale(scale=128.0)
  """
  caller, class_name = "from_jmp", type(loss_scale).__name__
  if class_name == "NoOpLossScale":
    return _fields.initial_result(_policies.FixedLossScale(1.0))
  if class_name not in _JMP_FIELDS:
    raise TypeError(
      f"from_jmp: loss_scale must be one of {', '.join(_JMP_FIELDS)} and"
      f" NoOpLossScale, got {_fields.safe_repr(loss_scale)}."
    )
  values = _fields.read_fields(
    caller, class_name, loss_scale, _JMP_FIELDS[class_name]
  )
  if "scale" in values:
    return _fields.initial_result(_policies.FixedLossScale(values["scale"]))
  backoff_factor = 1 / values["growth_factor"]
  policy = _fields.make_dynamic_policy(values, backoff_factor=backoff_factor)
  return _fields.resumed_result(caller, policy, values)
