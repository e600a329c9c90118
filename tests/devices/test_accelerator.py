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
TX = ols.with_loss_scaling(optax.adam(1e-2), ols.DynamicLossScale(SCALE))


def make_step():
  return small_model.make_step(TX, ols.autocast(small_model.loss_fn))


def list_platforms(tree):
  return {d.platform for x in jax.tree.leaves(tree) for d in x.devices()}


def test_a_step_runs_on_the_device_of_the_test():
  device = jax.config.jax_default_device or jax.devices()[0]
  params = small_model.init_params()
  (batch,) = small_model.make_batches(1)
  after = make_step()(params, TX.init(params), batch)
  assert list_platforms(after) == {device.platform}


def test_training_in_float16_is_close_to_float32():
  (batch,) = small_model.make_batches(1)

  def train(loss_fn):
    step = small_model.make_step(TX, loss_fn)
    params = small_model.init_params()
    opt_state = TX.init(params)
    for _ in range(20):
      params, opt_state, *_ = step(params, opt_state, batch)
    assert ols.get_loss_scale_state(opt_state).total_notfinite == 0
    return float(small_model.loss_fn(params, batch))

  half = train(ols.autocast(small_model.loss_fn))
  assert half == pytest.approx(train(small_model.loss_fn), rel=1e-2)
  assert half < 0.9 * small_model.loss_fn(small_model.init_params(), batch)


def test_an_overflow_skips_the_step_and_halves_the_scale():
  params = small_model.init_params()
  (batch,) = small_model.make_batches(1)
  opt_state = TX.init(params)
  overflowing = small_model.make_overflowing_batch(batch)
  after, new_state, *_ = make_step()(params, opt_state, overflowing)
  assert_same_bits(after, params)
  assert_same_bits(new_state.inner_state, opt_state.inner_state)
  state = ols.get_loss_scale_state(new_state)
  assert (state.loss_scale, state.last_finite) == (SCALE / 2, False)


def test_subnormal_float16_gradients_are_not_flushed():
  """2**-24 is the smallest float16 number."""
  small = 2.0**-24
  grad = jax.jit(jax.grad(lambda w, x: jnp.sum(w * x).astype(jnp.float32)))(
    jnp.ones(4, jnp.float16), jnp.full(4, small, jnp.float16)
  )
  np.testing.assert_array_equal(np.float32(grad), np.full(4, small))


@pytest.mark.slow
def test_find_overflow_returns_the_layer_whose_weight_overflows():
  params = small_model.init_params()
  (batch,) = small_model.make_batches(1)
  args = params, TX.init(params), batch
  assert diagnostics.find_overflow(make_step(), *args, progress=False) is None
  large = params | {"v": params["v"] * 1e6}
  overflow = diagnostics.find_overflow(
    make_step(), large, *args[1:], progress=False
  )
  assert (overflow.kind, overflow.param_path) == ("inf", "v")
