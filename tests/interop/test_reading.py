"""The input that the functions of interop accept, and their results."""

import dataclasses

from flax.training import dynamic_scale
from helpers import interop_samples as samples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import interop


@pytest.mark.parametrize(
  "call, valid", samples.CALLS.values(), ids=samples.CALLS
)
def test_a_state_read_from_another_system_has_our_types(call, valid):
  policy, state = call(valid)
  assert isinstance(policy, ols.LossScalePolicy)
  assert isinstance(state, ols.LossScaleState)
  dtypes = [str(x.dtype) for x in state[:5]]
  assert dtypes == ["float32", "int32", "int32", "bool", "int32"]
  assert not any(x.weak_type for x in jax.tree.leaves(state))


SCALARS = int, float, np.float16, np.float32, np.float64, np.int64, jnp.bfloat16
NUMBERS = [
  *(scalar(64) for scalar in SCALARS),
  *(np.array([64.0], np.float32), np.array([[64]]), jnp.array([64])),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
def test_numbers_may_come_from_python_numpy_or_jax(number):
  settings = {"initial_loss_scale": number, "increment_period": number}
  policy, state = interop.from_keras({**samples.TF_1, **settings})
  assert (policy.init_scale, policy.growth_interval) == (64.0, 64)
  assert type(policy.init_scale) is float
  assert type(policy.growth_interval) is int
  assert state.loss_scale == 64


def test_a_count_beyond_the_interval_grows_on_the_next_finite_step():
  """torch and Flax test for equality, and would never grow again."""
  for policy, state in (
    interop.from_torch({**samples.TORCH, "_growth_tracker": 25}),
    interop.from_flax({**samples.FLAX, "fin_steps": 25}),
    interop.from_keras(
      samples.KERAS_3, {**samples.KERAS_3_VARIABLES, "step_counter": 25}
    ),
  ):
    after = policy.adjust(state, jnp.array(True))
    assert after.loss_scale == 2 * state.loss_scale


def test_the_variables_of_keras_3_may_include_those_of_its_base_class():
  base_variables = {"iteration": 0, "learning_rate": 0.0}
  variables = samples.KERAS_3_VARIABLES
  expected = interop.from_keras(samples.KERAS_3, variables)
  found = interop.from_keras(samples.KERAS_3, variables | base_variables)
  assert found == expected
  with pytest.raises(ValueError, match="unknown key 'iteration'"):
    interop.from_keras(samples.TF, samples.TF_VARIABLES | base_variables)


def serialize(name, config):
  return {"module": "keras", "class_name": name, "config": config}


def make_old_optimizer(loss_scale):
  return {"optimizer": {"class_name": "Adam"}, "loss_scale": loss_scale}


KERAS, FLAX = interop.from_keras, interop.from_flax
QUARTERS = {**samples.TF_1, "multiplier": 4.0}
BY_QUARTERS = ols.DynamicLossScale(64.0, 4.0, 0.25, growth_interval=20)
OLD_QUARTERS = make_old_optimizer(serialize("DynamicLossScale", QUARTERS))
FIXED_8 = serialize("FixedLossScale", {"loss_scale_value": 8.0})
TF_8 = {"dynamic": False, "initial_scale": 8, "dynamic_growth_steps": None}
KERAS_3 = {**samples.KERAS_3, "inner_optimizer": {}, "name": "x"}
OLD_SERIALIZED = serialize("MixedPrecisionLossScaleOptimizer", OLD_QUARTERS)
# As Keras 3 writes it into the `compile_config` of a model.
COMPILED = {
  **dict.fromkeys(["loss_weights", "weighted_metrics", "jit_compile"]),
  **{"loss": "mse", "metrics": ["mae"], "run_eagerly": False},
  "steps_per_execution": 1,
  "optimizer": serialize("LossScaleOptimizer", KERAS_3)
  | {"registered_name": None},
}
NO_FLOOR = ols.DynamicLossScale(1024.0, min_scale=2.0**-126)
BY_20 = dataclasses.replace(NO_FLOOR, growth_interval=20)
BY_21 = dataclasses.replace(NO_FLOOR, growth_interval=21)
BY_10 = ols.DynamicLossScale(2.0**16, growth_interval=10, min_scale=2.0)
FLAX_9 = dynamic_scale.DynamicScale(growth_interval=9, minimum_scale=2.0)
OFF, FIXED = ols.FixedLossScale(1.0), ols.FixedLossScale(8.0)
DYNAMIC = ols.DynamicLossScale()
# Who reads, what is read, and the policy that it is.
POLICIES = [
  (interop.from_torch, {}, OFF),
  (samples.make_lookalike("NoOpLossScale"), {"loss_scale": 1}, OFF),
  (samples.make_lookalike("StaticLossScale"), {"loss_scale": 8}, FIXED),
  (KERAS, 8, FIXED),
  (lambda x: KERAS(x, {}), 8.0, FIXED),
  (KERAS, {"loss_scale_value": 8.0}, FIXED),
  (KERAS, FIXED_8, FIXED),
  (KERAS, make_old_optimizer(8.0), FIXED),
  (KERAS, make_old_optimizer(FIXED_8), FIXED),
  (KERAS, TF_8, FIXED),
  (KERAS, "dynamic", DYNAMIC),
  (KERAS, make_old_optimizer("dynamic"), DYNAMIC),
  (KERAS, {"dynamic": True}, DYNAMIC),
  (KERAS, samples.TF_1, ols.DynamicLossScale(64.0, growth_interval=20)),
  (KERAS, QUARTERS, BY_QUARTERS),
  (KERAS, OLD_SERIALIZED, BY_QUARTERS),
  (KERAS, serialize("LossScaleOptimizer", KERAS_3), BY_20),
  (KERAS, COMPILED, BY_20),
  (KERAS, {"optimizer": OLD_SERIALIZED, "loss": {}}, BY_QUARTERS),
  (FLAX, {**samples.FLAX, "minimum_scale": None}, BY_21),
  (FLAX, FLAX_9, BY_10),
]


@pytest.mark.parametrize("read, given, policy", POLICIES)
def test_each_way_to_write_a_loss_scale_is_read(read, given, policy):
  assert read(given)[0] == policy


def test_arguments_override_the_fields_of_flax():
  policy, _ = interop.from_flax(samples.FLAX, growth_interval=3)
  assert policy.growth_interval == 4
