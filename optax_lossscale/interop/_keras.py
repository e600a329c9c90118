"""Imports and exports scalers of TensorFlow 1 and 2, tf.keras and Keras 3."""

from collections.abc import Mapping
import functools
from typing import Any

from optax_lossscale import _arrays, _checks, _policies
from optax_lossscale.interop import _fields
from optax_lossscale.interop._fields import FieldSpec

# Keys of the optimizer configs that don't affect the loss scale.
_INNER_KEYS = ("inner_optimizer", "optimizer", "name")
# Early Keras 3 wrote these settings of the base class of its optimizers, which
# have no effect in a LossScaleOptimizer.
_KERAS_3_BASE_KEYS = (
  "weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema",
  "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor",
  "gradient_accumulation_steps",
)  # fmt: skip
_SERIALIZED_KEYS = (
  "class_name", "module", "registered_name", "build_config", "compile_config",
  "shared_object_id",
)  # fmt: skip
# Keys of a model's `get_compile_config()` other than its optimizer.
_COMPILE_KEYS = (
  "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly",
  "steps_per_execution", "jit_compile", "auto_scale_loss",
  "pss_evaluation_shards", "from_serialized",
)  # fmt: skip
# A serialized optimizer contains a config, which contains a loss scale. Deeper
# configs are rejected, so that a hostile file can't exhaust the stack.
_MAX_NESTING = 8
_OPTIMIZER_FIELDS = {
  "initial_scale": FieldSpec("init_scale", 2.0**15),
  "dynamic_growth_steps": FieldSpec("growth_interval", 2000),
}
_TF_OPTIMIZER_FIELDS = {
  "dynamic": FieldSpec("dynamic", True),
  **_OPTIMIZER_FIELDS,
}
_FIXED_FIELDS = {"loss_scale_value": FieldSpec("scale")}
_DYNAMIC_FIELDS = {
  "initial_loss_scale": FieldSpec("init_scale"),
  "increment_period": FieldSpec("growth_interval"),
  "multiplier": FieldSpec("growth_factor"),
}
_TF_VARIABLES = {
  "current_loss_scale": FieldSpec("loss_scale"),
  "good_steps": FieldSpec("finite_count"),
}
_KERAS_3_VARIABLES = {
  "dynamic_scale": FieldSpec("loss_scale"),
  "step_counter": FieldSpec("finite_count"),
}

# Variables of the base class of the optimizers of Keras 3.
_KERAS_3_BASE_VARIABLES = ("iteration", "learning_rate")

_read_fields = functools.partial(_fields.read_fields, "from_keras")


@_arrays.allow_transfers
def from_keras(config: Any, variables: Any = None) -> _fields.PolicyAndState:
  """The policy and state of a TensorFlow, tf.keras or Keras 3 loss scaler.

  All of them grow the scale on the N-th finite step and halve it (or divide it
  by `multiplier`) on an overflow. The minimum scale of TensorFlow and tf.keras
  is 1. The scale of Keras 3 is unbounded: it becomes 0 below 2**-126 and inf
  above 2**127, and never recovers. Our scale stays within [2**-126, 2**126].

  With a fixed scale, they apply steps with non-finite gradients. To do the same
  here, use the bare optimizer, and `value_and_grad` with this state.

  Args:
    config: one of these: the `get_config()` of a `FixedLossScale`,
      `DynamicLossScale` or `LossScaleOptimizer` (the key `dynamic` identifies
      tf.keras, and the key `loss_scale` TF 2.3 and older); the serialized
      `{"class_name": ..., "config": ...}` of this config, also for
      `MixedPrecisionLossScaleOptimizer`; the `get_compile_config()` of a model
      that was compiled with a `LossScaleOptimizer`; or the loss scale that
      these optimizers accept, `"dynamic"` or a number. Missing settings of a
      `LossScaleOptimizer` have its defaults. The nested config of the inner
      optimizer is ignored.
    variables: `{"current_loss_scale": ..., "good_steps": ...}` for TensorFlow
      and tf.keras (whose optimizers call them `loss_scale` and
      `dynamic_counter`), `{"dynamic_scale": ..., "step_counter": ...}` for
      Keras 3, where `iteration` and `learning_rate` are ignored; None or empty
      for a fixed scale.

  Returns:
    `(policy, state)`; the initial state if `variables` is None.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_keras(
    ...     {"inner_optimizer": {"class_name": "Adam", "config": {}},
    ...      "dynamic": True, "initial_scale": 1024.0,
    ...      "dynamic_growth_steps": 500},
    ...     {"current_loss_scale": 4096.0, "good_steps": 12})
    >>> policy.growth_interval, policy.min_scale, state.loss_scale.item()
    (500, 1.0, 4096.0)
  """
  policy = _policy_from_config(config)
  if variables is None:
    return _fields.initial_result(policy)
  if isinstance(policy, _policies.FixedLossScale):
    _read_fields("variables", variables, {})
    return _fields.initial_result(policy)
  if policy.min_scale == 1:
    values = _read_fields("variables", variables, _TF_VARIABLES)
  else:
    values = _read_fields(
      "variables", variables, _KERAS_3_VARIABLES, _KERAS_3_BASE_VARIABLES
    )
  return _fields.resumed_result("from_keras", policy, values)


@_arrays.allow_transfers
def to_keras(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The config and variables with which Keras continues as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` with the factors 2 and
      1/2 and no hysteresis. With `min_scale` 1 it is exported for tf.keras,
      with 2**-126, which is unbounded, for Keras 3. A
      :class:`~optax_lossscale.FixedLossScale` is exported for tf.keras.
    state: its state, or a pytree that holds it.

  Returns:
    `{"config": ..., "variables": ...}`, the arguments of :func:`from_keras`.
    Call `LossScaleOptimizer(inner_optimizer, **config)`, and assign the
    variables by name.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if Keras can't express the policy, or the tree has no state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(growth_interval=500)
    >>> ols.interop.to_keras(policy, policy.init())["variables"]
    {'current_loss_scale': 32768.0, 'good_steps': 0}
  """
  caller = "to_keras"
  if isinstance(policy, _policies.FixedLossScale):
    _fields.check_hyperparams(caller, policy, ("scale",))
    scale, _ = _fields.get_scale_and_count(caller, policy, state)
    fixed_config = {
      "dynamic": False,
      "initial_scale": scale,
      "dynamic_growth_steps": None,
    }
    return {"config": fixed_config, "variables": {}}
  floor_reason = "the minimum scale is 1 in tf.keras and 2**-126 in Keras 3"
  required_floor = _checks.MIN_LOSS_SCALE, floor_reason
  is_tf = (
    isinstance(policy, _policies.DynamicLossScale) and policy.min_scale == 1
  )
  written_fields = ("growth_interval", *(["min_scale"] if is_tf else []))
  dynamic_policy = _fields.as_dynamic_policy(
    caller, policy, written_fields, min_scale=required_floor
  )
  scale, count = _fields.get_scale_and_count(caller, policy, state)
  config = {
    "initial_scale": float(dynamic_policy.init_scale),
    "dynamic_growth_steps": int(dynamic_policy.growth_interval),
  }
  if is_tf:
    config, keys = {"dynamic": True, **config}, _TF_VARIABLES
  else:
    keys = _KERAS_3_VARIABLES
    count = _fields.clamp_count(count, dynamic_policy.growth_interval)
  variables = dict(zip(keys, (scale, count), strict=True))
  return {"config": config, "variables": variables}


def _policy_from_config(
  config: Any, depth: int = 0
) -> _policies.DynamicLossScale | _policies.FixedLossScale:
  """Return the policy of a config, of "dynamic" or of a number."""
  if isinstance(config, str) and config == "dynamic":
    return _policies.DynamicLossScale()
  if hasattr(type(config), "get_config"):
    raise TypeError(
      "from_keras: config must be a dict, got an object of type"
      f" {type(config).__name__}. Pass optimizer.get_config()."
    )
  if not isinstance(config, Mapping):
    scale = _fields.check_and_convert_field(
      "from_keras", "place of a config or 'dynamic'", "a scale", config, "scale"
    )
    return _policies.FixedLossScale(scale)
  # Three kinds of configs contain another config: serialized objects, the
  # optimizer of TF 2.3, and compiled models.
  wrapper_keys = {
    "config": _SERIALIZED_KEYS,
    "loss_scale": _INNER_KEYS,
    "optimizer": _COMPILE_KEYS,
  }
  for key, ignored in wrapper_keys.items():
    if key in config:
      inner = _read_fields(
        "config", config, {key: FieldSpec("inner")}, ignored
      )["inner"]
      if key == "optimizer":
        _check_optimizer(inner)
      if depth == _MAX_NESTING:
        raise ValueError(
          f"from_keras: config must be nested at most {_MAX_NESTING} levels"
          f" deep, got a deeper config: {_fields.safe_repr(config)}. Pass the"
          " config of the loss scaler itself."
        )
      return _policy_from_config(inner, depth + 1)
  return _policy_from_fields(config)


def _policy_from_fields(
  config: Mapping[Any, Any],
) -> _policies.DynamicLossScale | _policies.FixedLossScale:
  """Return the policy of a config that contains no other config."""
  if "loss_scale_value" in config:
    values = _read_fields("config of FixedLossScale", config, _FIXED_FIELDS)
    return _policies.FixedLossScale(values["scale"])
  if "dynamic" in config:
    return _policy_from_tf_config(config)
  if {"inner_optimizer", *_OPTIMIZER_FIELDS} & config.keys():
    ignored_keys = (*_INNER_KEYS, *_KERAS_3_BASE_KEYS)
    values = _read_fields(
      "config of Keras 3", config, _OPTIMIZER_FIELDS, ignored_keys
    )
    return _fields.make_dynamic_policy(values)
  values = _read_fields("config of DynamicLossScale", config, _DYNAMIC_FIELDS)
  backoff_factor = 1 / values["growth_factor"]
  return _fields.make_dynamic_policy(
    values, backoff_factor=backoff_factor, min_scale=1.0
  )


def _check_optimizer(optimizer: Any) -> None:
  """Raise unless the optimizer of a compile config scales the loss.

  Keras 3 wraps the optimizer of a mixed_float16 model after `compile`, but its
  compile config has the arguments of `compile`, with the bare optimizer.
  """
  is_config = isinstance(optimizer, Mapping)
  class_name = optimizer.get("class_name") if is_config else None
  if not (isinstance(class_name, str) and "LossScale" in class_name):
    raise ValueError(
      "from_keras: optimizer in the compile configuration must be a serialized"
      f" LossScaleOptimizer, got {_fields.safe_repr(class_name or optimizer)}."
      " Keras 3 wraps the optimizer of a mixed_float16 model later: pass"
      " model.optimizer.get_config()."
    )


def _policy_from_tf_config(
  config: Mapping[str, Any],
) -> _policies.DynamicLossScale | _policies.FixedLossScale:
  """Return the policy of a tf.keras optimizer config."""
  source_name = "config of tf.keras"
  values = _read_fields(source_name, config, _TF_OPTIMIZER_FIELDS, _INNER_KEYS)
  if values["dynamic"]:
    return _fields.make_dynamic_policy(values, min_scale=1.0)
  # `initial_scale` is required for a fixed scale, so it has no default here.
  fixed_specs = {**_TF_OPTIMIZER_FIELDS, "initial_scale": FieldSpec("scale")}
  return _policies.FixedLossScale(
    _read_fields(source_name, config, fixed_specs, _INNER_KEYS)["scale"]
  )
