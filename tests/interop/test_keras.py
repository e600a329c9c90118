"""Every config that Keras and TensorFlow write: read, or refused as there."""

from helpers import interop_samples as samples
import pytest

import optax_lossscale as ols
from optax_lossscale import interop


@pytest.mark.parametrize(
  "config, policy",
  [
    ("dynamic", ols.DynamicLossScale()),
    (128, ols.FixedLossScale(128.0)),
    (128.0, ols.FixedLossScale(128.0)),
    ({"loss_scale_value": 8.0}, ols.FixedLossScale(8.0)),
    (samples.TF_1, ols.DynamicLossScale(64.0, growth_interval=20)),
    (
      {**samples.TF_1, "multiplier": 4.0},
      ols.DynamicLossScale(64.0, 4.0, 0.25, growth_interval=20),
    ),
    (
      {"optimizer": {"class_name": "Adam"}, "loss_scale": "dynamic"},
      ols.DynamicLossScale(),
    ),
    ({"optimizer": {}, "loss_scale": 8.0}, ols.FixedLossScale(8.0)),
    (
      {
        "optimizer": {},
        "loss_scale": {
          "class_name": "FixedLossScale",
          "config": {"loss_scale_value": 8.0},
        },
      },
      ols.FixedLossScale(8.0),
    ),
    (
      {
        "class_name": "MixedPrecisionLossScaleOptimizer",
        "config": {
          "optimizer": {},
          "loss_scale": {
            "class_name": "DynamicLossScale",
            "config": {**samples.TF_1, "multiplier": 4.0},
          },
        },
      },
      ols.DynamicLossScale(64.0, 4.0, 0.25, growth_interval=20),
    ),
    (
      {
        "module": "keras.optimizers",
        "class_name": "LossScaleOptimizer",
        "config": {**samples.KERAS_3, "inner_optimizer": {}, "name": "x"},
        "registered_name": None,
      },
      ols.DynamicLossScale(1024.0, growth_interval=20, min_scale=2.0**-126),
    ),
    (
      {
        "class_name": "LossScaleOptimizer",
        "config": {
          **samples.TF,
          "dynamic": False,
          "dynamic_growth_steps": None,
        },
      },
      ols.FixedLossScale(1024.0),
    ),
    ({"dynamic": True}, ols.DynamicLossScale()),
  ],
)
def test_every_way_that_keras_writes_a_loss_scale_is_read(config, policy):
  assert interop.from_keras(config)[0] == policy


def test_a_fixed_scale_has_no_variables():
  assert interop.from_keras(128, {})[1].loss_scale == 128
  with pytest.raises(ValueError, match="Known keys: none"):
    interop.from_keras(128, samples.TF_VARIABLES)


KERAS_ERRORS = {
  "another class": (
    {"class_name": "Adam", "config": {"learning_rate": 0.1}},
    "class_name.*LossScaleOptimizer.*'Adam'",
  ),
  "a config of another class": ({"learning_rate": 0.1}, "Known keys"),
  "an empty config": ({}, "Known keys"),
  "fixed without a scale": ({"dynamic": False}, "'initial_scale' is missing"),
  "fixed with growth steps": (
    {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 5},
    "dynamic_growth_steps.*None if dynamic=False",
  ),
  "a start below the floor": (
    {"dynamic": True, "initial_scale": 0.5},
    r"initial_scale.*\[1, 2\*\*126\], got initial_scale = 0.5",
  ),
  "a fixed scale below 1": ({"loss_scale_value": 0.5}, "loss_scale_value"),
  "an argument below 1": (0.5, r"loss_scale.*\[1, "),
  "another word": ("static", "'dynamic'.*'static'"),
  "a multiplier that tf.keras refuses": (
    {
      "optimizer": {},
      "loss_scale": {
        "class_name": "DynamicLossScale",
        "config": {**samples.TF_1, "multiplier": 4.0},
      },
    },
    "multiplier.*must be 2.*4.0",
  ),
  "an optimizer for a loss scale": (
    {
      "optimizer": {},
      "loss_scale": {"class_name": "LossScaleOptimizer", "config": samples.TF},
    },
    "loss_scale.*FixedLossScale or DynamicLossScale",
  ),
  "endless nesting": (samples.nested_dict(100_000), "from_keras"),
  "no class name": ({"class_name": None, "config": {}}, "class_name"),
  "no config": ({"class_name": "LossScaleOptimizer"}, "'config' is missing"),
}


@pytest.mark.parametrize(
  "config, message", KERAS_ERRORS.values(), ids=KERAS_ERRORS
)
def test_a_config_that_keras_would_refuse_is_refused(config, message):
  with pytest.raises((ValueError, TypeError), match=message) as info:
    interop.from_keras(config)
  assert str(info.value).startswith("from_keras: ")


def test_the_inner_optimizer_is_read_past_and_named_among_the_keys():
  config = {**samples.TF, "inner_optimizer": samples.nested(100_000)}
  assert interop.from_keras(config)[0].growth_interval == 20
  with pytest.raises(ValueError, match=r"Read past: inner_optimizer"):
    interop.from_keras({**config, "momentum": 0.9})
