"""Wrong and hostile input: an error that says what, where and what is known."""

import re

from helpers import interop_samples as samples
import jax
import jax.numpy as jnp
import pytest

from optax_lossscale import interop

# None means "left out" for these, as it does in their own constructors.
NONE_IS_THE_DEFAULT = {
  "initial_scale",
  "dynamic_growth_steps",
  "dynamic",
  "minimum_scale",
  "min_loss_scale",
  "max_loss_scale",
  "init_scale",
  "scale_window",
  "initial_loss_scale",
  "loss_scale_window",
  "hysteresis",
  "fp16_init_scale",
  "fp16_scale_tolerance",
  "threshold_loss_scale",
  "loss_scale",
}
# Of these, settings may be left out.
WITH_DEFAULTS = {
  "tf.keras",
  "Keras 3",
  "TF 1",
  "Flax, fields",
  "apex, settings",
  "DeepSpeed",
  "DeepSpeed, old",
  "Megatron",
  "fairseq",
}
# Objects are read by attribute, and may have others.
DICTS = {
  name: pair
  for name, pair in samples.CALLS.items()
  if name not in ("jmp", "MindSpore", "fairseq, scale")
}


def keys():
  for name, (call, valid) in samples.CALLS.items():
    for key in valid:
      yield pytest.param(call, valid, key, id=f"{name}: {key}")


@pytest.mark.parametrize("call, valid, key", list(keys()))
def test_a_wrong_value_is_an_error_that_names_function_and_key(
  call, valid, key
):
  boolean = isinstance(valid[key], bool)
  for what, value in (samples.WRONG_TYPE | samples.WRONG_VALUE).items():
    if what == "a subnormal" and key == "fp16_scale_tolerance":
      continue  # Small, but a number of [0, 2**15]; refused as no fraction.
    if boolean and what == "a bool of numpy":
      continue
    if what == "a negative" and key == "hysteresis_tracker":
      continue  # They count on below zero.
    error = TypeError if boolean or what in samples.WRONG_TYPE else ValueError
    with pytest.raises(error) as info:
      call({**valid, key: value})
    message = str(info.value)
    assert re.match(r"from_\w+: ", message), what
    assert key in message, what
    assert "must be" in message, what
    assert len(message) < 400, what


@pytest.mark.parametrize("call, valid, key", list(keys()))
def test_none_and_bools_are_no_numbers(call, valid, key):
  if key not in NONE_IS_THE_DEFAULT:
    with pytest.raises((TypeError, ValueError), match=f"from_.*{key}"):
      call({**valid, key: None})
  if not isinstance(valid[key], bool):
    with pytest.raises(TypeError, match=f"from_.*{key}.*got {key} = True"):
      call({**valid, key: True})


def required_keys():
  for name, (call, valid) in samples.CALLS.items():
    needed = set(valid)
    if name in WITH_DEFAULTS:
      needed &= {"fp16_scale_window"}
    if name == "Flax":
      needed &= {"fin_steps", "scale"}
    if name == "fairseq, scale":
      needed = set()
    for key in valid:
      case = call, valid, key, key in needed
      yield pytest.param(*case, id=f"{name}: {key}")


@pytest.mark.parametrize("call, valid, key, is_needed", list(required_keys()))
def test_a_missing_key_is_named_where_there_is_no_default(
  call, valid, key, is_needed
):
  rest = {k: v for k, v in valid.items() if k != key}
  if not is_needed:
    call(rest)
    return
  with pytest.raises(ValueError, match=f"from_.*{key}"):
    call(rest)


@pytest.mark.parametrize("call, valid", DICTS.values(), ids=DICTS)
def test_an_unknown_key_is_an_error_that_lists_the_known_ones(call, valid):
  for unknown in ("growth_faktor", "x" * 10_000):
    with pytest.raises(ValueError) as info:
      call({**valid, unknown: 1})
    message = str(info.value)
    assert re.match(r"from_\w+: unknown key", message)
    assert unknown[:20] in message
    assert all(key in message for key in valid)
    assert len(message) < 700


@pytest.mark.parametrize(
  "source",
  [
    None,
    "state",
    b"x",
    3,
    1.5,
    True,
    [("scale", 1.0)],
    (),
    float,
    samples.Hostile(),
  ],
  ids=lambda x: type(x).__name__,
)
def test_what_is_no_dict_is_a_type_error(source):
  for call in (
    interop.from_torch,
    interop.from_paddle,
    interop.from_deepspeed,
    interop.from_apex,
    interop.from_flax,
    interop.from_jmp,
    interop.from_megatron,
    interop.from_fairseq,
    lambda x: (
      interop.from_megatron(samples.MEGATRON, x) if x is not None else None
    ),
    lambda x: interop.from_keras(samples.TF, x) if x is not None else None,
    lambda x: (
      interop.from_deepspeed(samples.FP16, x) if x is not None else None
    ),
  ):
    if source is None and call.__name__ == "<lambda>":
      continue
    with pytest.raises((TypeError, ValueError), match="from_"):
      call(source)


def test_keys_that_are_no_strings_are_unknown_keys():
  for key in (
    1,
    None,
    ("scale",),
    samples.nested(1)[0].__class__,
    samples.Hostile(),
  ):
    with pytest.raises(ValueError, match="from_torch: unknown key"):
      interop.from_torch({**samples.TORCH, key: 1.0})


def test_a_traced_number_is_refused_by_name():
  def read(scale):
    return interop.from_torch({**samples.TORCH, "scale": scale})[1]

  with pytest.raises(TypeError, match=r"from_torch: scale.*outside of jit"):
    jax.jit(read)(jnp.float32(64))


OUT_OF_BOUNDS = {
  "torch at 2**127": (interop.from_torch, {**samples.TORCH, "scale": 2.0**127}),
  "torch at 0": (interop.from_torch, {**samples.TORCH, "scale": 0.0}),
  "tf.keras below its floor": (
    lambda v: interop.from_keras(samples.TF, v),
    {**samples.TF_VARIABLES, "current_loss_scale": 0.5},
  ),
  "Flax below its floor": (interop.from_flax, {**samples.FLAX, "scale": 1.0}),
  "amp above its ceiling": (
    lambda v: interop.from_apex({"loss_scaler0": v}),
    {**samples.AMP, "loss_scale": 2.0**25},
  ),
  "DeepSpeed below its floor": (
    lambda v: interop.from_deepspeed(samples.FP16, v),
    {**samples.DEEPSPEED, "cur_scale": 0.5},
  ),
}


@pytest.mark.parametrize(
  "call, values", OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS
)
def test_a_scale_outside_of_its_own_bounds_is_not_moved_into_them(call, values):
  with pytest.raises(ValueError, match=r"from_.*scale.*must be.*got .*scale ="):
    call(values)


STARTS_TOO_LOW = {
  "amp": (
    lambda v: interop.from_apex({}, **v),
    {"init_scale": 2.0, "min_loss_scale": 4.0},
    "init_scale in settings must be at least min_loss_scale",
  ),
  "DeepSpeed": (
    interop.from_deepspeed,
    {"initial_scale_power": 2, "min_loss_scale": 8.0},
    "min_loss_scale in fp16 must be at most the initial scale, 4",
  ),
}


@pytest.mark.parametrize(
  "call, settings, message", STARTS_TOO_LOW.values(), ids=STARTS_TOO_LOW
)
def test_a_start_below_the_floor_is_an_error(call, settings, message):
  with pytest.raises(ValueError, match=f"from_.*{message}"):
    call(settings)


def test_a_serialized_config_must_be_a_dict_of_a_known_class():
  serialized = {"class_name": "Adam", "config": samples.KERAS_3}
  with pytest.raises(ValueError, match=r"class_name.*one of FixedLoss.*Adam"):
    interop.from_keras(serialized)
  no_config = {"class_name": "LossScaleOptimizer", "config": [1, 2]}
  with pytest.raises(TypeError, match=r"from_keras: config .*must be a dict"):
    interop.from_keras(no_config)


def test_an_attribute_that_cannot_be_read_is_an_error_of_ours():
  def fail(self):
    raise RuntimeError("out of order")

  broken = {**samples.JMP, "period": property(fail)}
  with pytest.raises(ValueError, match=r"from_jmp.*period.*raises RuntimeErr"):
    samples.look_alike("DynamicLossScale")(broken)


class KeysAsAttributes(dict):
  """As `easydict` and others: an attribute that is missing is a KeyError."""

  __getattr__ = dict.__getitem__


class Settings:
  def __init__(self, **values):
    self.values = values

  def __getattr__(self, name):
    return self.__dict__["values"][name]


@pytest.mark.parametrize("kind", [KeysAsAttributes, Settings])
def test_an_object_may_raise_a_key_error_for_an_attribute(kind):
  policy, _ = interop.from_fairseq(
    kind(fp16_init_scale=2.0**7, fp16_scale_window=10)
  )
  assert policy.init_scale == 2.0**7


@pytest.mark.parametrize("convert", [interop.from_megatron, interop.from_keras])
def test_a_key_of_random_numbers_is_no_setting(convert):
  with pytest.raises(TypeError, match=r"PRNGKeyArray|key<fry>"):
    convert(jax.random.key(0))


def test_a_deepspeed_scaler_must_agree_with_its_block():
  for key, value in (
    ("scale_window", 21),
    ("min_scale", 2),
    ("delayed_shift", 1),
    ("consecutive_hysteresis", True),
    ("scale_factor", 4.0),
  ):
    with pytest.raises(ValueError, match=f"{key}.*as in the fp16 block"):
      interop.from_deepspeed(samples.FP16, {**samples.DEEPSPEED, key: value})
  with pytest.raises(ValueError, match=r"last_overflow_iter.*less than"):
    interop.from_deepspeed(
      samples.FP16, {**samples.DEEPSPEED, "last_overflow_iter": 30}
    )
  with pytest.raises(ValueError, match="'cur_hysteresis' is missing"):
    state = {
      k: v for k, v in samples.DEEPSPEED.items() if k != "cur_hysteresis"
    }
    interop.from_deepspeed(samples.FP16, state)
  once = {**samples.FP16, "hysteresis": 1}
  assert interop.from_deepspeed(once, state)[1].loss_scale == 1024


@pytest.mark.parametrize(
  "version", ["", "new", "17", "0.x", "0." + "9" * 10**6, "-1.0"]
)
def test_a_version_that_is_none_is_an_error(version):
  with pytest.raises(ValueError, match="from_deepspeed: version"):
    interop.from_deepspeed(samples.FP16, version=version)


def test_a_version_that_is_no_string_is_an_error():
  for version in (0.17, None, (0, 17, 3)):
    with pytest.raises(TypeError, match="from_deepspeed: version"):
      interop.from_deepspeed(samples.FP16, version=version)


@pytest.mark.parametrize("floor", [{}, {"minimum_scale": None}])
def test_none_is_no_number_where_flax_has_no_floor(floor):
  fields = {k: v for k, v in samples.FLAX.items() if k != "minimum_scale"}
  for key in fields:
    with pytest.raises(TypeError, match=f"from_flax: {key}.*got {key} = None"):
      interop.from_flax({**fields, **floor, key: None})


def test_a_flax_field_must_not_be_given_twice():
  with pytest.raises(ValueError, match=r"from_flax: growth_interval.*once"):
    interop.from_flax(samples.FLAX, growth_interval=3)
