"""Plain JAX loops: scans, auxiliary outputs, several losses or optimizers."""

import dataclasses

import chex
from helpers.bits import assert_same_bits
from helpers.small_model import (
  half_loss_fn,
  init_params,
  make_batches,
  make_step,
  overflowing,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

POLICY = ols.DynamicLossScale(growth_interval=3)


def test_a_scan_equals_a_loop_through_growth_and_overflow():
  policy = dataclasses.replace(POLICY, init_scale=2.0**10)
  tx = ols.with_loss_scaling(optax.adam(0.01), policy)
  step = make_step(tx, half_loss_fn)
  batches = make_batches(8)
  batches[4] = overflowing(batches[4])

  def body(carry, batch):
    *carry, loss = step(*carry, batch)
    return tuple(carry), (loss, ols.get_loss_scale_state(carry[1]).loss_scale)

  params = init_params()
  carry = params, tx.init(params)
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
  scanned, (losses, scales) = jax.jit(
    lambda carry: jax.lax.scan(body, carry, stacked)
  )(carry)
  for batch in batches:
    *carry, _ = step(*carry, batch)
  chex.assert_trees_all_close(scanned, tuple(carry), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(
    np.log2(scales), [10, 10, 11, 11, 10, 10, 10, 11]
  )
  np.testing.assert_array_equal(np.isfinite(losses), np.arange(8) != 4)


def test_haiku_style_model_state_does_not_move_on_a_skip():
  # Pure functions of (params, state), as hk.transform_with_state makes them.
  def apply(params, state, x):
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(x, 0)
    return jnp.tanh((x - mean) @ params["w"]), {"mean": mean}

  def loss_fn(params, state, x, y):
    out, state = apply(params, state, x)
    return jnp.mean((out - y[:, :1]) ** 2), state

  tx = ols.with_loss_scaling(optax.sgd(0.1))

  @jax.jit
  def step(params, state, opt_state, x, y):
    differentiated = ols.value_and_grad(loss_fn, opt_state, has_aux=True)
    (_, new_state), grads = differentiated(params, state, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    state = ols.select_if_finite(opt_state, new_state, state)
    return optax.apply_updates(params, updates), state, opt_state

  params, state = {"w": jnp.ones((4, 1))}, {"mean": jnp.zeros(4)}
  (batch,) = make_batches(1)
  carry = step(params, state, tx.init(params), *batch)
  after = step(*carry, *overflowing(batch))
  assert_same_bits(after[:2], carry[:2])
  moved = step(*after, *batch)
  assert not np.array_equal(moved[1]["mean"], after[1]["mean"])


@pytest.mark.parametrize("overflowing_loss", [0, 1])
def test_two_scales_and_one_optimizer_take_one_decision(overflowing_loss):
  tx = ols.with_loss_scaling(optax.sgd(0.5), 1.0)  # it skips, and scales not

  def square(w, x):
    return jnp.sum(w * x) ** 2 / 2

  @jax.jit
  def step(w, opt_state, scale_states, xs):
    grads = [
      ols.grad(square, s)(w, x) for s, x in zip(scale_states, xs, strict=True)
    ]
    scale_states = [
      POLICY.adjust(s, ols.all_finite(g))
      for s, g in zip(scale_states, grads, strict=True)
    ]
    updates, opt_state = tx.update(optax.tree.add(*grads), opt_state, w)
    return optax.apply_updates(w, updates), opt_state, scale_states

  w, xs = jnp.array([1.0, 2.0]), jnp.eye(2)
  carry = w, tx.init(w), [POLICY.init(), POLICY.init()]
  w, *carry = step(*carry, xs)
  np.testing.assert_array_equal(w, [0.5, 1.0])
  bad_xs = xs.at[overflowing_loss].mul(jnp.inf)
  after, opt_state, scale_states = step(w, *carry, bad_xs)
  assert_same_bits(after, w)
  assert ols.get_loss_scale_state(opt_state).total_notfinite == 1
  # Only the scale of the loss that overflowed goes down.
  scales = [s.loss_scale for s in scale_states]
  assert scales.pop(overflowing_loss) == 2.0**14
  assert scales == [2.0**15]
