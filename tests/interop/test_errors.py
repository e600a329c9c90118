"""Wrong and hostile input: an error that says what, where and what is known."""

import re

from helpers import interop_samples as samples
import jax
import jax.numpy as jnp
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


# jmp's object may have other attributes.
@pytest.mark.parametrize("name", sorted(samples.CALLS.keys() - {"jmp"}))
def test_an_unknown_key_raises_an_error_with_the_known_ones(name):
  call, valid = samples.CALLS[name]
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
  "Flax": interop.from_flax,
  "jmp": interop.from_jmp,
  "Keras": lambda x: interop.from_keras([x]),
  "Keras variables": lambda x: interop.from_keras(samples.TF, [x]),
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
  ("Flax", {"scale": 1.0}, "min_scale = 2.0, init_scale = 1.0"),
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


from_keras, from_torch = interop.from_keras, interop.from_torch
ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
# A part of the error, the function, and its arguments.
VALUE_ERRORS = [
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
]
TYPE_ERRORS = [
  ("'dynamic'.*'static'", from_keras, "static"),
  (r"Pass optimizer\.get_config\(\)", from_keras, make_object("get_config")),
  (r"Pass scaler\.state_dict\(\)", from_torch, make_object("state_dict")),
]


@pytest.mark.parametrize(
  "error, rows", [(ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)]
)
def test_objects_that_the_other_system_would_not_write_are_refused(error, rows):
  for message, call, *args in rows:
    with pytest.raises(error, match=rf"^from_\w+: .*{message}"):
      call(*args)
