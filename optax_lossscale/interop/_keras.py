"""The scalers of TensorFlow 1 and 2, tf.keras and Keras 3."""

from collections.abc import Mapping
import functools
from typing import Any

from optax_lossscale import _checks, _policies
from optax_lossscale.interop import _reading, _results, _writing

_FIXED = ("loss_scale_value",)
_DYNAMIC = {
  "initial_loss_scale": 2.0**15,
  "increment_period": 2000,
  "multiplier": 2.0,
}
_OLD_OPTIMIZER = ("loss_scale",)
_KERAS_3_OPTIMIZER = {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}
_TF_OPTIMIZER = {"dynamic": True, **_KERAS_3_OPTIMIZER}
# The configs of the optimizers hold these, too. Scaling has no use for them.
_INNER = ("inner_optimizer", "optimizer", "name")
# Early Keras 3 wrote these settings of its base class, which do nothing there.
_KERAS_3_BASE = (
  "weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema",
  "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor",
  "gradient_accumulation_steps",
)  # fmt: skip
_ENVELOPE = ("class_name", "config")
_ENVELOPE_IGNORED = (
  "module", "registered_name", "build_config", "compile_config",
  "shared_object_id",
)  # fmt: skip
_OPTIMIZERS = ("LossScaleOptimizer", "LossScaleOptimizerV3")
_TF_1_OPTIMIZER = "MixedPrecisionLossScaleOptimizer"
_CLASSES = ("FixedLossScale", "DynamicLossScale", *_OPTIMIZERS, _TF_1_OPTIMIZER)

_TF_VARIABLES = ("current_loss_scale", "good_steps")
_KERAS_3_VARIABLES = ("dynamic_scale", "step_counter")

_read = functools.partial(_reading.read_mapping, "from_keras")


def from_keras(config: Any, variables: Any = None) -> _results.Result:
  """The policy and state of a TensorFlow, tf.keras or Keras 3 loss scaler.

  All of them grow the scale on the N-th finite step and halve it (or divide it
  by `multiplier`) on an overflow. TensorFlow and tf.keras have a floor of 1.
  Keras 3 has neither floor nor ceiling: its scale becomes 0 below 2**-126 and
  inf above 2**127, and stays so. Ours stays within [2**-126, 2**126].

  With a fixed scale, they apply steps with non-finite gradients. To do the same
  here, use the bare optimizer, and `value_and_grad` with this state.

  Args:
    config: what `get_config()` of a `FixedLossScale`, `DynamicLossScale` or
      `LossScaleOptimizer` returns (that of tf.keras is told by its key
      `dynamic`, that of TF 2.3 and before by `loss_scale`); the serialized
      `{"class_name": ..., "config": ...}` around it, also for
      `MixedPrecisionLossScaleOptimizer`; or what those optimizers take for a
      loss scale, `"dynamic"` or a number of at least 1. Settings left out have
      the defaults of the class. The nested config of the inner optimizer is
      read past.
    variables: `{"current_loss_scale": ..., "good_steps": ...}` of TensorFlow
      and tf.keras (where an optimizer has them as `loss_scale` and
      `dynamic_counter`), `{"dynamic_scale": ..., "step_counter": ...}` of
      Keras 3; none of a fixed scale.

  Returns:
    `(policy, state)`; the initial state if there are no variables.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, a value out of range, or the
      config that of another class.

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
  name, config = _unwrapped(config)
  kind = _kind(name, config)
  policy = _READERS[kind](config)
  if variables is None:
    return _results.start(policy)
  if isinstance(policy, _policies.FixedLossScale):
    _read("variables", variables, ())
    return _results.start(policy)
  names = _KERAS_3_VARIABLES if kind == "Keras 3" else _TF_VARIABLES
  values = _read("variables", variables, names).complete()
  return _results.resume(policy, values, *names)


def to_keras(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The config and variables with which Keras goes on as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` with the factors 2 and
      1/2 and no hysteresis. With `min_scale` 1 it is written for tf.keras, with
      2**-126, which is no bound, for Keras 3. A
      :class:`~optax_lossscale.FixedLossScale` is written for tf.keras.
    state: its state, or a pytree that holds it.

  Returns:
    `{"config": ..., "variables": ...}`, which is also what :func:`from_keras`
    takes. Call `LossScaleOptimizer(inner_optimizer, **config)`, and assign the
    variables by name.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if Keras has no such rule, or the tree no such state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(growth_interval=500)
    >>> ols.interop.to_keras(policy, policy.init())["variables"]
    {'current_loss_scale': 32768.0, 'good_steps': 0}
  """
  target = _writing.Target("to_keras", "Keras's LossScaleOptimizer")
  scale, count = target.scale_and_count(state)
  if isinstance(policy, _policies.FixedLossScale):
    fixed = {
      "dynamic": False,
      "initial_scale": scale,
      "dynamic_growth_steps": None,
    }
    return {"config": fixed, "variables": {}}
  doubles, halves = (2, "it doubles"), (0.5, "it halves")
  dynamic = target.dynamic(policy, growth_factor=doubles, backoff_factor=halves)
  config = {
    "initial_scale": float(dynamic.init_scale),
    "dynamic_growth_steps": int(dynamic.growth_interval),
  }
  if dynamic.min_scale == 1:
    config, names = {"dynamic": True, **config}, _TF_VARIABLES
  else:
    floors = "tf.keras has a floor of 1 and Keras 3 none, which is 2**-126 here"
    target.check(policy, min_scale=(_checks.SMALLEST_SCALE, floors))
    names = _KERAS_3_VARIABLES
    count = _writing.count_below(count, dynamic.growth_interval)
  variables = dict(zip(names, (scale, count), strict=True))
  return {"config": config, "variables": variables}


def _unwrapped(config: Any) -> tuple[str | None, Any]:
  """The class name, if the config is a serialized one, and the config in it."""
  if not (isinstance(config, Mapping) and "class_name" in config):
    return None, config
  values = _read("the serialized config", config, _ENVELOPE, _ENVELOPE_IGNORED)
  found = values.complete().found
  name, inner = found["class_name"], found["config"]
  if not isinstance(name, str) or name not in _CLASSES:
    values.fail("class_name", f"one of {', '.join(_CLASSES)}", ValueError)
  if not isinstance(inner, Mapping):
    values.fail("config", "a dict", TypeError)
  return name, inner


def _kind(name: str | None, config: Any) -> str:
  """Which reader a config is for; told by its class, or else by its keys."""
  if not isinstance(config, Mapping):
    return "argument"
  if name in ("FixedLossScale", "DynamicLossScale", _TF_1_OPTIMIZER):
    return name
  if "loss_scale" in config:
    return "old optimizer"
  if "dynamic" in config:
    return "tf.keras"
  if name in _OPTIMIZERS or any(key in config for key in _KERAS_3_OPTIMIZER):
    return "Keras 3"
  if any(key in config for key in _FIXED):
    return "FixedLossScale"
  if any(key in config for key in _DYNAMIC):
    return "DynamicLossScale"
  known = [*_TF_OPTIMIZER, *_OLD_OPTIMIZER, *_FIXED, *_DYNAMIC, *_ENVELOPE]
  raise ValueError(
    "from_keras: config is of no class that is known, got"
    f" {_reading.show(config)}. Known keys: {', '.join(known)}; known classes:"
    f" {', '.join(_CLASSES)}."
  )


def _from_tf_optimizer(config: Any) -> _policies.LossScalePolicy:
  values = _read("config of tf.keras", config, _TF_OPTIMIZER, _INNER)
  # None is the default of tf.keras's arguments.
  values = values.without_none()
  if values.boolean("dynamic"):
    return _dynamic(values, 1.0)
  if "dynamic_growth_steps" in values:
    values.fail("dynamic_growth_steps", "None if dynamic=False", ValueError)
  values.require("initial_scale")
  return _policies.FixedLossScale(values.scale("initial_scale"))


def _dynamic(
  values: _reading.Values, floor: float
) -> _policies.DynamicLossScale:
  """The scale of an optimizer of either Keras, which doubles and halves."""
  return _policies.DynamicLossScale(
    init_scale=values.scale("initial_scale", floor),
    growth_interval=values.count("dynamic_growth_steps"),
    min_scale=floor,
  )


def _from_keras_3_optimizer(config: Any) -> _policies.LossScalePolicy:
  ignored = (*_INNER, *_KERAS_3_BASE)
  values = _read("config of Keras 3", config, _KERAS_3_OPTIMIZER, ignored)
  return _dynamic(values, _checks.SMALLEST_SCALE)


def _from_old_optimizer(config: Any) -> _policies.LossScalePolicy:
  """The LossScaleOptimizer of TF 2.3 and before, read as tf.keras reads it."""
  policy = _from_tf_1_optimizer(config)
  factor = getattr(policy, "growth_factor", 2.0)
  if factor != 2:
    raise ValueError(
      "from_keras: multiplier in the DynamicLossScale of a LossScaleOptimizer"
      f" must be 2, which is what tf.keras accepts, got multiplier = {factor}."
    )
  return policy


def _from_tf_1_optimizer(config: Any) -> _policies.LossScalePolicy:
  values = _read("config of the optimizer", config, _OLD_OPTIMIZER, _INNER)
  name, scale = _unwrapped(values.complete().found["loss_scale"])
  kind, scales = _kind(name, scale), ("FixedLossScale", "DynamicLossScale")
  if kind not in ("argument", *scales):
    values.fail("loss_scale", f"a {' or '.join(scales)}", ValueError)
  return _READERS[kind](scale)


def _from_fixed(config: Any) -> _policies.LossScalePolicy:
  values = _read("config of FixedLossScale", config, _FIXED).complete()
  return _policies.FixedLossScale(values.scale("loss_scale_value", 1.0))


def _from_dynamic(config: Any) -> _policies.LossScalePolicy:
  values = _read("config of DynamicLossScale", config, _DYNAMIC)
  factor = values.growth("multiplier")
  return _policies.DynamicLossScale(
    init_scale=values.scale("initial_loss_scale", 1.0),
    growth_factor=factor,
    backoff_factor=1 / factor,
    growth_interval=values.count("increment_period"),
    min_scale=1.0,
  )


def _from_argument(argument: Any) -> _policies.LossScalePolicy:
  if isinstance(argument, str) and argument == "dynamic":
    return _from_dynamic({})
  if isinstance(argument, str | bytes | list | tuple | type | None):
    raise TypeError(
      "from_keras: a loss scale must be a config, 'dynamic' or a number, got"
      f" {_reading.show(argument)}."
    )
  given = {"loss_scale": argument}
  values = _reading.Values("from_keras", "the argument", given)
  return _policies.FixedLossScale(values.scale("loss_scale", 1.0))


_READERS = {
  "argument": _from_argument,
  "FixedLossScale": _from_fixed,
  "DynamicLossScale": _from_dynamic,
  _TF_1_OPTIMIZER: _from_tf_1_optimizer,
  "old optimizer": _from_old_optimizer,
  "tf.keras": _from_tf_optimizer,
  "Keras 3": _from_keras_3_optimizer,
}
