# Copyright 2026 the optax_lossscale authors. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
"""Tests for dynamic loss scaling in `_loss_scaling.py`."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
from optax._src import alias
from optax._src import combine
from optax._src import update
from optax.contrib import _loss_scaling
from optax.schedules import _inject


def _loss(params, x):
  half = params['w'].astype(jnp.float16) * x.astype(jnp.float16)
  return jnp.mean(half.astype(jnp.float32) ** 2)


class LossScalingTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.params = {'w': jnp.array([1.0, -0.0, 3.0])}
    self.bad_grads = {'w': jnp.array([1.0, jnp.inf, jnp.nan])}

  @parameterized.parameters(1, 2, 3)
  def test_scale_grows_on_the_last_step_of_an_interval(self, interval):
    tx = _loss_scaling.with_loss_scaling(
        alias.sgd(0.1), init_scale=8.0, growth_interval=interval
    )
    state = tx.init(self.params)
    for step in range(1, 7):
      _, state = tx.update(self.params, state, self.params)
      expected = 8.0 * 2.0 ** (step // interval)
      self.assertEqual(state.loss_scale_state.loss_scale, expected)

  @parameterized.parameters(alias.sgd, alias.adam, alias.adamw, alias.lion)
  def test_a_skipped_step_changes_only_the_scale(self, make_optimizer):
    tx = _loss_scaling.with_loss_scaling(make_optimizer(0.1))
    state = tx.init(self.params)
    _, state = tx.update(self.params, state, self.params)
    updates, new_state = jax.jit(tx.update)(self.bad_grads, state, self.params)
    new_params = update.apply_updates(self.params, updates)
    np.testing.assert_array_equal(
        np.signbit(new_params['w']), np.signbit(self.params['w'])
    )
    np.testing.assert_array_equal(new_params['w'], self.params['w'])
    jax.tree.map(
        np.testing.assert_array_equal, new_state.inner_state, state.inner_state
    )
    self.assertEqual(
        new_state.loss_scale_state.loss_scale,
        state.loss_scale_state.loss_scale / 2,
    )
    self.assertEqual(new_state.loss_scale_state.total_notfinite, 1)
    self.assertFalse(new_state.loss_scale_state.last_finite)

  def test_the_scale_stays_within_its_bounds(self):
    tx = _loss_scaling.with_loss_scaling(
        alias.sgd(0.1),
        init_scale=4.0,
        growth_interval=1,
        min_scale=2.0,
        max_scale=8.0,
    )
    state = tx.init(self.params)
    for grads, bound in ((self.bad_grads, 2.0), (self.params, 8.0)):
      for _ in range(5):
        _, state = tx.update(grads, state, self.params)
      self.assertEqual(state.loss_scale_state.loss_scale, bound)

  def test_small_gradients_survive_in_float16(self):
    x = jnp.full(3, 2.0**-13)
    tx = _loss_scaling.with_loss_scaling(alias.sgd(0.1))
    state = tx.init(self.params)
    value_and_grad = _loss_scaling.scaled_value_and_grad(_loss, state)
    loss, grads = value_and_grad(self.params, x)
    expected = jax.grad(lambda w: jnp.mean((w * x) ** 2))(self.params['w'])
    np.testing.assert_allclose(grads['w'], expected, rtol=1e-3)
    self.assertEqual(loss, _loss(self.params, x))
    unscaled = jax.grad(_loss)(self.params, x)
    self.assertFalse(np.any(unscaled['w']))

  def test_a_step_is_traced_once_and_scanned(self):
    tx = _loss_scaling.with_loss_scaling(alias.adam(0.1), init_scale=8.0)

    def step(carry, x):
      params, state = carry
      grads = _loss_scaling.scaled_value_and_grad(_loss, state)(params, x)[1]
      updates, state = tx.update(grads, state, params)
      return (update.apply_updates(params, updates), state), None

    batches = jnp.ones((4, 3)).at[2].set(jnp.inf)
    carry = self.params, tx.init(self.params)
    (params, state), _ = jax.lax.scan(step, carry, batches)
    self.assertEqual(state.loss_scale_state.total_notfinite, 1)
    self.assertTrue(np.all(np.isfinite(params['w'])))

  def test_float16_parameters_get_float16_updates(self):
    params = {'w': self.params['w'].astype(jnp.float16)}
    tx = _loss_scaling.with_loss_scaling(alias.adam(1e-4))
    state = tx.init(params)
    updates, new_state = tx.update(params, state, params)
    self.assertEqual(updates['w'].dtype, jnp.float16)
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    self.assertEqual(dtypes(new_state), dtypes(state))
    self.assertNotIn(jnp.float16, dtypes(state))

  @parameterized.parameters(
      complex(np.nan, 1.0), complex(1.0, np.nan), complex(1.0, np.inf)
  )
  def test_a_nonfinite_complex_gradient_skips_the_step(self, bad):
    params = jnp.array([1.0 - 2.0j, complex(-0.0, -0.0)])
    # The trace makes the update nonzero although the gradients are masked.
    tx = _loss_scaling.with_loss_scaling(alias.sgd(0.1, momentum=0.9))
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    updates, new_state = tx.update(jnp.array([bad, 1.0]), state, params)
    self.assertEqual(new_state.loss_scale_state.total_notfinite, 1)
    new_params = update.apply_updates(params, updates)
    for part in (np.real, np.imag):
      old, new = part(params), part(new_params)
      np.testing.assert_array_equal(new, old)
      np.testing.assert_array_equal(np.signbit(new), np.signbit(old))

  def test_a_skipped_step_keeps_a_key_that_may_be_used_again(self):
    tx = _loss_scaling.with_loss_scaling(
        alias.noisy_sgd(0.1, key=jax.random.key(0))
    )
    keys = []
    with jax.debug_key_reuse(True):
      state = tx.init(self.params)
      for grads in self.params, self.bad_grads, self.params:
        _, state = jax.jit(tx.update)(grads, state, self.params)
        keys.append(jax.random.key_data(state.inner_state[0].rng_key))
    np.testing.assert_array_equal(keys[0], keys[1])
    self.assertFalse(np.array_equal(keys[1], keys[2]))

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.complex64)
  def test_gradients_are_exact_with_any_scale(self, dtype):
    tx = _loss_scaling.with_loss_scaling(alias.sgd(0.1), init_scale=1001.0)
    w = jnp.ones([], dtype)
    loss_fn = lambda w: jnp.real(3 * w).astype(jnp.float32)
    value_and_grad = _loss_scaling.scaled_value_and_grad(loss_fn, tx.init(w))
    _, grads = value_and_grad(w)
    self.assertEqual(grads.dtype, dtype)
    self.assertEqual(grads, 3)

  def test_the_loss_is_scaled_with_the_state_of_a_chain(self):
    params = {'loss_scale': jnp.ones(3)}
    tx = combine.chain(
        _loss_scaling.with_loss_scaling(alias.adam(0.1)),
        alias.sgd(0.1, momentum=0.9),
    )
    loss_fn = lambda params: jnp.sum(params['loss_scale'] ** 2)
    value_and_grad = _loss_scaling.scaled_value_and_grad(
        loss_fn, tx.init(params)
    )
    _, grads = value_and_grad(params)
    np.testing.assert_array_equal(grads['loss_scale'], 2.0)
    with self.assertRaisesRegex(ValueError, 'state of with_loss_scaling'):
      _loss_scaling.scaled_value_and_grad(loss_fn, alias.adam(0.1).init(params))

  @parameterized.parameters(
      {'init_scale': 0.0},
      {'init_scale': float('nan')},
      {'init_scale': 2.0**127},
      {'min_scale': 0.0},
      {'growth_factor': 0.5},
      {'growth_factor': float('nan')},
      {'backoff_factor': 2.0},
      {'growth_interval': 0},
  )
  def test_a_setting_out_of_range_raises_an_error(self, **setting):
    (name,) = setting
    with self.assertRaisesRegex(ValueError, f'{name} = '):
      _loss_scaling.with_loss_scaling(alias.sgd(0.1), **setting)

  def test_settings_can_be_injected(self):
    make_tx = _inject.inject_hyperparams(_loss_scaling.with_loss_scaling)
    tx = make_tx(alias.sgd(0.1), init_scale=8.0, growth_interval=1)
    state = jax.jit(tx.init)(self.params)
    _, state = jax.jit(tx.update)(self.params, state, self.params)
    scale_state = state.inner_state.loss_scale_state
    self.assertEqual(scale_state.loss_scale, 16.0)


if __name__ == '__main__':
  absltest.main()
