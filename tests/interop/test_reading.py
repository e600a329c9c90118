"""What the functions of interop accept, and what they make of it."""

import subprocess
import sys
import types

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
def test_the_dicts_of_this_module_are_valid(call, valid):
  policy, state = call(valid)
  assert isinstance(policy, ols.LossScalePolicy)
  assert isinstance(state, ols.LossScaleState)
  dtypes = [str(x.dtype) for x in state[:5]]
  assert dtypes == ["float32", "int32", "int32", "bool", "int32"]
  assert not any(x.weak_type for x in jax.tree.leaves(state))


NUMBERS = [
  64,
  64.0,
  np.float32(64),
  np.float64(64),
  np.int64(64),
  np.array(64.0),
  np.array([64.0], np.float32),
  np.array([[64]]),
  jnp.float32(64),
  jnp.array([64]),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
def test_numbers_may_be_of_python_numpy_or_jax(number):
  config = {
    **samples.TF_1,
    "initial_loss_scale": number,
    "increment_period": number,
  }
  policy, state = interop.from_keras(config)
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


def test_a_disabled_scaler_is_a_scale_of_one():
  for call in (interop.from_torch, interop.from_paddle):
    assert call({})[0] == ols.FixedLossScale(1.0)
  assert interop.from_deepspeed({"enabled": False})[0] == ols.FixedLossScale(
    1.0
  )


def test_a_fixed_scale_is_fixed():
  fixed = ols.FixedLossScale(64.0)
  no = {"use_dynamic_loss_scaling": False}
  assert interop.from_paddle({**samples.PADDLE, **no})[0] == fixed
  assert interop.from_deepspeed({**samples.FP16, "loss_scale": 64})[0] == fixed
  assert interop.from_megatron({"loss_scale": 64}, {})[0] == fixed
  assert interop.from_megatron({"loss_scale": 64})[0] == fixed
  assert interop.from_apex({}, loss_scale=64)[0] == fixed
  static = type("StaticLossScale", (), {"loss_scale": np.float32(64)})()
  assert interop.from_jmp(static)[0] == fixed
  static = type("StaticLossScaler", (), {"scale_value": np.float32(64)})()
  assert interop.from_jmp(static)[0] == fixed
  no_op = type("NoOpLossScale", (), {"loss_scale": 1})()
  assert interop.from_jmp(no_op)[0] == ols.FixedLossScale(1.0)
  with pytest.raises(ValueError, match="from_megatron: unknown key"):
    interop.from_megatron({"loss_scale": 64}, samples.MEGATRON_STATE)


def test_settings_may_be_the_attributes_of_an_object():
  args = types.SimpleNamespace(**samples.MEGATRON, lr=0.1, world_size=8)
  assert interop.from_megatron(args) == interop.from_megatron(samples.MEGATRON)
  args = types.SimpleNamespace(**samples.FAIRSEQ, arch="transformer")
  assert interop.from_fairseq(args) == interop.from_fairseq(samples.FAIRSEQ)
  scaler = types.SimpleNamespace(
    **samples.DEEPSPEED, scale_window=20, dtype=object()
  )
  left, right = (
    interop.from_deepspeed(samples.FP16, s) for s in (scaler, samples.DEEPSPEED)
  )
  assert left == right
  with pytest.raises(TypeError, match=r"from_megatron.*has none"):
    interop.from_megatron(types.SimpleNamespace(lr=0.1))


def test_the_version_names_the_rule():
  for version in ("0.9.5", "0.16.9", "0.17", "0.17.0", "0.17.0+cu12"):
    policy, _ = interop.from_deepspeed(samples.FP16, version=version)
    assert isinstance(policy, ols.DynamicLossScale)
  for version in ("0.17.1", "0.17.3+abc", "0.18", "0.19.8", "1.0"):
    policy, _ = interop.from_deepspeed(samples.FP16, version=version)
    assert isinstance(policy, interop.DeepSpeedLossScale)


def test_an_instance_of_flax_is_read_and_another_object_is_not():
  dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
  given = dynamic_scale.DynamicScale(growth_interval=9, minimum_scale=None)
  policy, state = interop.from_flax(given)
  assert (policy.growth_interval, policy.min_scale) == (10, 2.0**-126)
  assert state.loss_scale == 65536
  with pytest.raises(TypeError, match="from_flax: dynamic_scale must be a Dyn"):
    interop.from_flax(types.SimpleNamespace(scale=1.0, fin_steps=0))


def test_interop_imports_no_framework():
  program = (
    "import sys; import optax_lossscale.interop\n"
    "names = 'torch tensorflow tf_keras keras flax jmp deepspeed paddle "
    "mindspore megatron fairseq apex'.split()\n"
    "assert not set(names) & set(sys.modules), set(names) & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", program], check=True)
