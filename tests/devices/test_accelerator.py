"""Training in float16 on the GPU or TPU that JAX_PLATFORMS names, or on CPU."""

from helpers import small_model
from helpers.bits import assert_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

pytestmark = pytest.mark.accelerator

SCALE = 2.0**10
TX = ols.with_loss_scaling(
  optax.sgd(0.1, momentum=0.9), ols.DynamicLossScale(SCALE)
)


STEP = small_model.make_step(TX, ols.autocast(small_model.loss_fn))
PARAMS = small_model.init_params()
(BATCH,) = small_model.make_batches(1)


def list_platforms(tree):
  return {d.platform for x in jax.tree.leaves(tree) for d in x.devices()}


def test_a_step_runs_on_the_device_of_the_test():
  device = jax.config.jax_default_device or jax.devices()[0]
  after = STEP(PARAMS, TX.init(PARAMS), BATCH)
  assert list_platforms(after) == {device.platform}


def test_training_in_float16_is_close_to_float32():
  def train(step):
    params, opt_state = PARAMS, TX.init(PARAMS)
    losses = []
    for _ in range(20):
      params, opt_state, loss = step(params, opt_state, BATCH)
      losses.append(loss)
    assert ols.get_loss_scale_state(opt_state).total_notfinite == 0
    return losses

  half, full = train(STEP), train(small_model.make_step(TX))
  np.testing.assert_allclose(half, full, rtol=1e-2)
  assert half[-1] < 0.9 * half[0]


def test_an_overflow_skips_the_step_and_halves_the_scale():
  opt_state = TX.init(PARAMS)
  overflowing = small_model.make_overflowing_batch(BATCH)
  after, new_state, *_ = STEP(PARAMS, opt_state, overflowing)
  assert_same_bits(after, PARAMS)
  assert_same_bits(new_state.inner_state, opt_state.inner_state)
  state = ols.get_loss_scale_state(new_state)
  assert (state.loss_scale, state.last_finite) == (SCALE / 2, False)


def test_subnormal_float16_gradients_are_not_flushed():
  """2**-24 is the smallest float16 number."""
  small = 2.0**-24
  grad = jax.jit(jax.grad(lambda w, x: jnp.sum(w * x).astype(jnp.float32)))(
    np.ones(4, np.float16), np.full(4, small, np.float16)
  )
  np.testing.assert_array_equal(np.float32(grad), np.full(4, small))


@pytest.mark.slow
def test_find_overflow_returns_the_layer_whose_weight_overflows():
  args = TX.init(PARAMS), BATCH
  assert diagnostics.find_overflow(STEP, PARAMS, *args, progress=False) is None
  large = PARAMS | {"v": PARAMS["v"] * 1e6}
  overflow = diagnostics.find_overflow(STEP, large, *args, progress=False)
  assert (overflow.kind, overflow.param_path) == ("inf", "v")
