"""A valid dict for everything that interop reads, and values that are none."""

import numpy as np

from optax_lossscale import interop

TF = {"dynamic": True, "initial_scale": 1024.0, "dynamic_growth_steps": 20}
KERAS_3 = {"initial_scale": 1024.0, "dynamic_growth_steps": 20}
TF_1 = {"initial_loss_scale": 64.0, "increment_period": 20, "multiplier": 2.0}
_RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 20}
TORCH = {"scale": 1024.0, **_RULE, "_growth_tracker": 3}
NEMO = {**TORCH, "_hysteresis_tracker": 2}
FLAX_FIELDS = {**_RULE, "minimum_scale": 2.0}
FLAX = {**FLAX_FIELDS, "fin_steps": 3, "scale": 1024.0}
_TRACKERS = {"growth_tracker": 3, "hysteresis_tracker": 2}
KERNEL = {"current_scale": 64.0, **_TRACKERS}
KERNEL_SETTINGS = {**_RULE, "hysteresis": 2}
AMP = {"loss_scale": 1024.0, "unskipped": 3}
AMP_SETTINGS = {
  "init_scale": 2.0**16,
  "scale_window": 20,
  "min_loss_scale": 1.0,
  "max_loss_scale": 2.0**20,
}
FP16 = {
  "enabled": True,
  "loss_scale": 0,
  "initial_scale_power": 16,
  "loss_scale_window": 20,
  "hysteresis": 2,
  "consecutive_hysteresis": False,
  "min_loss_scale": 1,
}
DEEPSPEED = {
  "cur_scale": 1024.0,
  "cur_iter": 30,
  "last_overflow_iter": 20,
  "cur_hysteresis": 2,
}
MEGATRON = {
  "initial_loss_scale": 2.0**16,
  "min_loss_scale": 1.0,
  "loss_scale_window": 20,
  "hysteresis": 2,
}
MEGATRON_STATE = {"scale": 64.0, **_TRACKERS}
FAIRSEQ = {
  "fp16_init_scale": 128.0,
  "fp16_scale_window": 20,
  "fp16_scale_tolerance": 0.25,
  "threshold_loss_scale": 2.0,
  "min_loss_scale": 1.0,
}
PADDLE = {
  "scale": np.array([64.0], np.float32),
  "incr_ratio": 2.0,
  "decr_ratio": 0.5,
  "incr_every_n_steps": 20,
  "decr_every_n_nan_or_inf": 2,
  "incr_count": 3,
  "decr_count": 1,
  "use_dynamic_loss_scaling": True,
}
TF_VARIABLES = {"current_loss_scale": 64.0, "good_steps": 3}
KERAS_3_VARIABLES = {"dynamic_scale": 64.0, "step_counter": 3}


def make_lookalike(class_name):
  return lambda values: interop.from_jmp(type(class_name, (), values)())


JMP = {
  "loss_scale": 64.0,
  "counter": 3,
  "period": 20,
  "factor": 2,
  "min_loss_scale": 1.0,
}
MINDSPORE = {
  "scale_value": 64.0,
  "counter": 3,
  "scale_window": 20,
  "scale_factor": 2,
}

# Every dict that can be passed: a name, the call, and a valid dict.
CALLS = {
  "tf.keras": (interop.from_keras, TF),
  "Keras 3": (interop.from_keras, KERAS_3),
  "TF 1": (interop.from_keras, TF_1),
  "tf.keras variables": (lambda v: interop.from_keras(TF, v), TF_VARIABLES),
  "Keras 3 variables": (
    lambda v: interop.from_keras(KERAS_3, v),
    KERAS_3_VARIABLES,
  ),
  "torch": (interop.from_torch, TORCH),
  "NeMo": (lambda v: interop.from_torch(v, hysteresis=2), NEMO),
  "NeMo, settings": (
    lambda v: interop.from_torch(NEMO, **v),
    {"hysteresis": 2},
  ),
  "Flax": (interop.from_flax, FLAX),
  "Flax, fields": (
    lambda v: interop.from_flax({"fin_steps": 3, "scale": 1024.0}, **v),
    FLAX_FIELDS,
  ),
  "jmp": (make_lookalike("DynamicLossScale"), JMP),
  "MindSpore": (make_lookalike("DynamicLossScaler"), MINDSPORE),
  "apex": (lambda v: interop.from_apex({"loss_scaler0": v}), AMP),
  "apex, settings": (lambda v: interop.from_apex({}, **v), AMP_SETTINGS),
  "apex, kernel": (lambda v: interop.from_apex(v, **KERNEL_SETTINGS), KERNEL),
  "apex, kernel settings": (
    lambda v: interop.from_apex(KERNEL, **v),
    KERNEL_SETTINGS,
  ),
  "DeepSpeed": (interop.from_deepspeed, FP16),
  "DeepSpeed, old": (lambda v: interop.from_deepspeed(v, version="0.16"), FP16),
  "DeepSpeed, state": (lambda v: interop.from_deepspeed(FP16, v), DEEPSPEED),
  "Megatron": (interop.from_megatron, MEGATRON),
  "Megatron, state": (
    lambda v: interop.from_megatron(MEGATRON, v),
    MEGATRON_STATE,
  ),
  "fairseq": (interop.from_fairseq, FAIRSEQ),
  "fairseq, scale": (
    lambda v: interop.from_fairseq(FAIRSEQ, **v),
    {"loss_scale": 64.0},
  ),
  "Paddle": (interop.from_paddle, PADDLE),
}


# The settings of these that may be left out.
OPTIONAL = {
  "tf.keras": TF,
  "Keras 3": KERAS_3,
  "Flax": FLAX_FIELDS,
  "Flax, fields": FLAX_FIELDS,
  "apex, settings": AMP_SETTINGS,
  "DeepSpeed": FP16,
  "DeepSpeed, old": FP16,
  "Megatron": MEGATRON,
  "fairseq": set(FAIRSEQ) - {"fp16_scale_window"},
  "fairseq, scale": {"loss_scale"},
}
# Calls that are not given the dict itself.
_OBJECT_CALLS = "jmp", "MindSpore", "fairseq, scale", "NeMo, settings"
OBJECTS = [CALLS[name][0] for name in _OBJECT_CALLS]


class Hostile:
  """Raises an error in every method."""

  def __repr__(self):
    raise RecursionError

  __str__ = __repr__
  __hash__ = object.__hash__

  def __eq__(self, other):
    raise RuntimeError("not comparable")

  def __array__(self, *args, **kwargs):
    raise RuntimeError("no array")

  def __getattr__(self, name):
    raise RuntimeError(name)


def make_nested_list(depth):
  value = []
  for _ in range(depth):
    value = [value]
  return value


WRONG_TYPE = {
  "a string": "1024",
  "bytes": b"1024",
  "a long string": "9" * 100_000,
  "a complex number": 1j,
  "a list": [1.0],
  "a deep list": make_nested_list(100_000),
  "a dict": {"scale": 1.0},
  "a class": float,
  "a function": abs,
  "a hostile object": Hostile(),
  "two numbers": np.ones(2, np.float32),
  "no number": np.ones(0, np.float32),
  "an array of strings": np.array("1024"),
  "an array of bool": np.array(True),
  "a bool": True,
  "a bool of numpy": np.True_,
}
WRONG_VALUE = {
  "NaN": float("nan"),
  "inf": float("inf"),
  "-inf": -np.float32(np.inf),
  "a negative": -5,
  "a huge float": 1e300,
  "a huge int": 10**5000,
  "a negative huge int": -(10**5000),
  "a subnormal": 1e-45,
}
# Samples that are valid for some keys.
VALID_FOR_KEYS = {
  "_hysteresis_tracker": ["a negative"],
  "hysteresis_tracker": ["a negative"],  # They count below zero.
  "cur_hysteresis": ["a negative"],
  "fp16_scale_tolerance": ["a subnormal"],
  "loss_scale": ["a subnormal"],  # FixedLossScale refuses it.
}
