"""A valid dict for everything that interop reads, and values that are none."""

import numpy as np

from optax_lossscale import interop

TF = {"dynamic": True, "initial_scale": 1024.0, "dynamic_growth_steps": 20}
KERAS_3 = {"initial_scale": 1024.0, "dynamic_growth_steps": 20}
TF_1 = {"initial_loss_scale": 64.0, "increment_period": 20, "multiplier": 2.0}
_RULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 20}
TORCH = {"scale": 1024.0, **_RULE, "_growth_tracker": 3}
FLAX_FIELDS = {**_RULE, "minimum_scale": 2.0}
FLAX = {**FLAX_FIELDS, "fin_steps": 3, "scale": 1024.0}
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
  "Flax": (interop.from_flax, FLAX),
  "Flax, fields": (
    lambda v: interop.from_flax({"fin_steps": 3, "scale": 1024.0}, **v),
    FLAX_FIELDS,
  ),
  "jmp": (make_lookalike("DynamicLossScale"), JMP),
}


# The settings of these that may be left out.
OPTIONAL = {
  "tf.keras": TF,
  "Keras 3": KERAS_3,
  "Flax": FLAX_FIELDS,
  "Flax, fields": FLAX_FIELDS,
}


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
