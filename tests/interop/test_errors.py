"""Wrong and hostile input: an error that says what, where and what is known."""

import re

from helpers import interop_samples as samples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import interop

KEYS = {
  f"{name}: {key}": (name, key)
  for name, (_, valid) in samples.CALLS.items()
  for key in valid
}
each_key = pytest.mark.parametrize("name, key", KEYS.values(), ids=KEYS)


@each_key
def test_a_wrong_value_raises_an_error_with_function_and_key(name, key):
  call, valid = samples.CALLS[name]
  is_bool = isinstance(valid[key], bool)
  for what, value in (samples.WRONG_TYPE | samples.WRONG_VALUE).items():
    if is_bool and "bool" in what:
      continue
    if what in samples.VALID_FOR_KEYS.get(key, ()):
      continue
    wrong_type = is_bool or what in samples.WRONG_TYPE
    with pytest.raises(TypeError if wrong_type else ValueError) as info:
      call({**valid, key: value})
    message = str(info.value).split("\n")[0]
    assert re.match(rf"from_\w+: {key}.* must be .*, got", message), what
    assert len(str(info.value)) < 700, what


@each_key
def test_none_is_treated_as_missing_and_named_if_there_is_no_default(name, key):
  call, valid = samples.CALLS[name]
  left_out = {k: v for k, v in valid.items() if k != key}
  for values in (left_out, {**valid, key: None}):
    if key in samples.OPTIONAL.get(name, ()):
      call(values)
      continue
    with pytest.raises(ValueError, match=f"from_.* must hold .*{key}.*missing"):
      call(values)


@pytest.mark.parametrize("name", samples.CALLS)
def test_an_unknown_key_raises_an_error_with_the_known_ones(name):
  call, valid = samples.CALLS[name]
  if call in samples.OBJECTS:
    return  # These may have other attributes.
  for unknown in ("growth_faktor", "x" * 10_000):
    with pytest.raises(ValueError, match=r"from_\w+: unknown key") as info:
      call({**valid, unknown: 1})
    message = str(info.value)
    assert unknown[:20] in message
    assert all(key in message for key in valid)
    assert len(message) < 700


def test_a_key_that_is_not_a_string_is_an_unknown_key():
  for key in (1, None, ("scale",), samples.Hostile()):
    with pytest.raises(ValueError, match="from_torch: unknown key"):
      interop.from_torch({**samples.TORCH, key: 1.0})


READERS = {
  "torch": interop.from_torch,
  "Paddle": interop.from_paddle,
  "DeepSpeed": interop.from_deepspeed,
  "apex": interop.from_apex,
  "Flax": interop.from_flax,
  "jmp": interop.from_jmp,
  "Megatron": interop.from_megatron,
  "fairseq": interop.from_fairseq,
  "Keras": lambda x: interop.from_keras([x]),
  "Keras variables": lambda x: interop.from_keras(samples.TF, [x]),
  "Megatron, state": lambda x: interop.from_megatron(samples.MEGATRON, [x]),
  "DeepSpeed, state": lambda x: interop.from_deepspeed(samples.FP16, [x]),
}


@pytest.mark.parametrize("call", READERS.values(), ids=READERS)
def test_an_object_without_values_raises_a_type_error(call):
  for source in (None, "state", b"x", 3, 1.5, [("scale", 1.0)], float):
    with pytest.raises(TypeError, match=r"from_\w+: .* must be"):
      call(source)
  with pytest.raises(TypeError, match=r"^from_\w+: "):
    call(jax.random.key(0))


@pytest.mark.parametrize("key", ["config", "loss_scale"])
def test_endlessly_nested_settings_are_refused_by_name(key):
  deep = endless = {}
  endless[key] = endless
  for _ in range(3_000):
    deep = {key: deep}
  for config in (deep, endless):
    message = "from_keras: config must be nested at most 8 levels deep"
    with pytest.raises(ValueError, match=message) as info:
      interop.from_keras(config)
    assert len(str(info.value)) < 700
  config = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 2.0}
  expected = interop.from_keras(config)
  for _ in range(8):
    config = {key: config}
  assert interop.from_keras(config) == expected


def test_a_traced_number_is_refused_by_name():
  def read(scale):
    return interop.from_torch({**samples.TORCH, "scale": scale})[1]

  with pytest.raises(TypeError, match=r"from_torch: scale in .*got .*Tracer"):
    jax.jit(read)(jnp.float32(64))


# The call, what of its valid values is exchanged, and what the error says.
NESTED = samples.make_nested_list(9**5)
REFUSED = [
  (
    "tf.keras variables",
    {"current_loss_scale": 0.5},
    r"scale in the state.*minimum 1 and the maximum 2\*\*126.*got scale = 0.5",
  ),
  ("apex", {"loss_scale": 2.0**25}, "scale in the state must be between the"),
  ("Flax", {"scale": 1.0}, "min_scale = 2.0, init_scale = 1.0"),
  ("apex, settings", {"init_scale": 0.5}, "min_scale = 1.0, init_scale = 0.5"),
  ("DeepSpeed", {"min_loss_scale": 2.0**17}, "init_scale = 65536.0"),
  ("Megatron, state", {"hysteresis_tracker": 3}, "at most .*2, got 3"),
  ("DeepSpeed, state", {"last_overflow_iter": 30}, "less than cur_iter, 30"),
  (
    "tf.keras",
    {"inner_optimizer": NESTED, "momentum": 0.9},
    "'momentum'.*Known keys: dynamic.*Ignored keys: inner_optimizer",
  ),
  ("tf.keras", {"dynamic": False, "initial_scale": None}, "hold initial_scale"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_values_that_no_other_system_writes_are_refused(name, changes, message):
  call, valid = samples.CALLS[name]
  with pytest.raises(ValueError, match=message):
    call({**valid, **changes})


def make_object(method):
  return type("Scaler", (), {method: lambda self: {}})()


def from_nemo(changes, hysteresis=None):
  values = {**samples.TORCH, **changes}
  return interop.from_torch(values, hysteresis=hysteresis)


def from_apex(saved, loss_id=None):
  return interop.from_apex(saved, loss_id=loss_id)


from_deepspeed, from_keras = interop.from_deepspeed, interop.from_keras
from_megatron, from_torch = interop.from_megatron, interop.from_torch
AMP, FP16, STATE = samples.AMP, samples.FP16, samples.DEEPSPEED
ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
EIGHT, OFF = {"loss_scale": 8}, {"enabled": False}
DYNAMIC_EIGHT = {"cur_scale": 8.0, "dynamic": True}
OTHER_SETTINGS = {
  "scale_window": 21,
  "min_scale": 2,
  "delayed_shift": 1,
  "consecutive_hysteresis": True,
  "scale_factor": 4.0,
}
NO_VERSIONS = "", "new", "17", "0.x", "0." + "9" * 10**6, "-1.0"
# A part of the error, the function, and its arguments.
VALUE_ERRORS = [
  *(
    (message, from_megatron, settings, samples.MEGATRON_STATE)
    for settings, message in (
      # A power of two, and another number.
      ({"min_loss_scale": 2.0**21}, r"minimum 2\*\*21 .* 2\*\*126 .* = 64"),
      ({"min_loss_scale": 2.5e6}, r"minimum 2500000 and the maximum 2\*\*126"),
      ({"loss_scale": 64}, "unknown key 'scale'.*Known keys: none"),
    )
  ),
  ("Choose one with", from_apex, {"loss_scaler0": AMP, "loss_scaler1": AMP}),
  ("must hold loss_scaler1", from_apex, {"loss_scaler0": AMP}, 1),
  ("unknown key 'learning_rate'", from_keras, ADAM),
  ("must hold initial_loss_s", from_keras, {}),
  ("key 'class_name'", from_keras, {"class_name": "LossScaleOptimizer"}),
  ("Known keys: none", from_keras, 128, samples.TF_VARIABLES),
  *(
    (
      "optimizer in the compile configuration must be .*[Aa]dam|missing",
      *(from_keras, {"optimizer": optimizer, "loss": "mse"}),
    )
    for optimizer in ("adam", None, ADAM)
  ),
  *(
    (f"{key}.*as in the fp16 block", from_deepspeed, FP16, STATE | {key: value})
    for key, value in OTHER_SETTINGS.items()
  ),
  *(
    (message, from_deepspeed, block, state)
    for block in (EIGHT, OFF)
    for state, message in (
      ({}, "must hold cur_scale"),
      ({"cur_scale": 64.0}, "cur_scale in .* must be [18].0, as in the fp16"),
      (STATE, "unknown key 'cur_iter' in state of a fixed scale"),
      ({"scale": 8.0}, "unknown key 'scale'"),
    )
  ),
  ("be True, as .*got Fal", from_deepspeed, {}, STATE | {"dynamic": False}),
  ("be False, as .*got Tr", from_deepspeed, EIGHT, DYNAMIC_EIGHT),
  *(("version must", from_deepspeed, FP16, None, x) for x in NO_VERSIONS),
  (r"Pass config\['fp16'\]", from_deepspeed, {"micro_batch": 8, "fp16": FP16}),
  ("NeMo .* hysteresis is missi", from_nemo, {"_hysteresis_tracker": 1}),
  ("must hold .* _hysteresis_tracker is missing", from_nemo, {}, 2),
  ("at most .* 2, got 3", from_nemo, {"_hysteresis_tracker": 3}, 2),
  ("hysteresis in .* integer", from_nemo, {"_hysteresis_tracker": 1}, 0),
]
NO_STATES = 0, False, "", [], np.zeros(2), np.ones(3), 1.5
TYPE_ERRORS = [
  ("'dynamic'.*'static'", from_keras, "static"),
  (r"Pass optimizer\.get_config\(\)", from_keras, make_object("get_config")),
  (r"Pass scaler\.state_dict\(\)", from_torch, make_object("state_dict")),
  *(("fixed scale must be a dict", from_megatron, EIGHT, x) for x in NO_STATES),
  *(("state of a fixed", from_deepspeed, EIGHT, x) for x in (0, [8], "8")),
  *(("version", from_deepspeed, FP16, None, x) for x in (0.17, None, (0, 1))),
  *(
    (f"{x} in fp16 must be resolved first", from_deepspeed, FP16 | {x: "auto"})
    for x in ("enabled", "loss_scale", "hysteresis")
  ),
]


@pytest.mark.parametrize(
  "error, rows", [(ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)]
)
def test_objects_that_the_other_system_would_not_write_are_refused(error, rows):
  for message, call, *args in rows:
    with pytest.raises(error, match=rf"^from_\w+: .*{message}"):
      call(*args)


DEEPSPEED, FAIRSEQ = interop.DeepSpeedLossScale, interop.FairseqLossScale
# For each hyperparameter, values that are out of range or of a wrong type.
BAD = {
  (DEEPSPEED, "init_scale"): [0.5, 2.0**127, "65536"],
  (DEEPSPEED, "growth_interval"): [0],
  (DEEPSPEED, "min_scale"): [0.0],
  (DEEPSPEED, "hysteresis"): [1.5, True],
  (DEEPSPEED, "consecutive_hysteresis"): [1],
  (FAIRSEQ, "growth_interval"): [2**31],
  (FAIRSEQ, "init_scale"): [1e-9],
  (FAIRSEQ, "min_scale"): [-1.0],
  (FAIRSEQ, "threshold"): [0.0, [1.0]],
  (FAIRSEQ, "tolerance"): [-0.1, float("inf"), "0.1"],
}


@pytest.mark.parametrize("rule, name", BAD)
def test_a_hyperparameter_out_of_range_or_of_a_wrong_type_is_named(rule, name):
  for value in BAD[rule, name]:
    is_number = isinstance(value, float) or type(value) is int
    wrong_type = not is_number or name == "consecutive_hysteresis"
    with pytest.raises(TypeError if wrong_type else ValueError, match=name):
      rule(**{"growth_interval": 10, name: value})
