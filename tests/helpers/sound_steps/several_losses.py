"""Steps with several losses, optimizers or networks."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.sound_steps import integers, normal, train
from helpers.train_steps import (
  apply_updates,
  BATCH,
  jit_step,
  loss_fn,
  PARAMS,
  TX,
)
import optax_lossscale as ols

OTHERS = {"w": PARAMS["w"].T}


def _apply(params, x):
  return jnp.tanh(x @ params["w"])


def gan():
  """Two optimizers, each with its loss scale."""

  def critic_loss_fn(critic, generator, real, noise):
    fake_loss = jax.nn.softplus(_apply(critic, _apply(generator, noise)))
    return jnp.mean(fake_loss + jax.nn.softplus(-_apply(critic, real)))

  def generator_loss_fn(generator, critic, noise):
    return jnp.mean(jax.nn.softplus(-_apply(critic, _apply(generator, noise))))

  @jax.jit
  def train_step(generator, critic, g_state, c_state, real, noise):
    critic, c_state, c_loss = train(
      TX, critic_loss_fn, critic, c_state, generator, real, noise
    )
    generator, g_state, g_loss = train(
      TX, generator_loss_fn, generator, g_state, critic, noise
    )
    return generator, critic, g_state, c_state, (c_loss, g_loss)

  states = TX.init(PARAMS), TX.init(OTHERS)
  return train_step, (PARAMS, OTHERS, *states, BATCH, BATCH[::-1])


def dqn():
  """The target network follows slowly, and has no gradient."""

  def loss_fn(params, target_params, batch):
    state, action, reward, next_state, is_last = batch
    next_value = jnp.max(_apply(target_params, next_state), -1)
    target = reward + 0.9 * jnp.where(is_last, 0, next_value)
    values = _apply(params, state)
    value = jnp.take_along_axis(values, action[:, None], 1)[:, 0]
    return jnp.mean(optax.huber_loss(value, lax.stop_gradient(target)))

  is_last = np.arange(8) == 3
  batch = BATCH, integers(4, 8), normal(8, seed=3), BATCH[::-1], is_last

  @jax.jit
  def train_step(params, target, opt_state, batch):
    params, opt_state, loss = train(
      TX, loss_fn, params, opt_state, target, batch
    )
    new_target = optax.incremental_update(params, target, 0.05)
    target = ols.select_if_applied(opt_state, new_target, target)
    return params, target, opt_state, loss

  return train_step, (PARAMS, PARAMS, TX.init(PARAMS), batch)


def a_state_for_each_loss():
  """Two loss-scale states next to the optimizer, which only skips."""
  policy = ols.DynamicLossScale()
  tx = ols.with_loss_scaling(optax.adam(1e-2), 1.0)

  def train_step(params, opt_state, scale_states, batch):
    pairs = zip(scale_states, (batch, batch**2), strict=True)
    all_grads = [ols.grad(loss_fn, state)(params, x) for state, x in pairs]
    scale_states = [
      policy.adjust(state, ols.all_finite(grads))
      for state, grads in zip(scale_states, all_grads, strict=True)
    ]
    grads = optax.tree.add(*all_grads)
    return *apply_updates(tx, grads, params, opt_state), scale_states

  return jit_step(train_step, [policy.init(), policy.init()], tx=tx)


def pretrained_features():
  """A frozen encoder runs in float16 as well, outside of the loss."""

  def train_step(head, opt_state, encoder, batch):
    features = ols.autocast(_apply)(encoder, batch)
    grads = ols.grad(loss_fn, opt_state)(head, features)
    return apply_updates(TX, grads, head, opt_state)

  return jit_step(train_step, OTHERS)


def alternating_updates():
  """A second model learns the residuals, in every second step."""

  def residual_loss_fn(second, first, batch):
    residual = 1 - lax.stop_gradient(_apply(first, batch))
    return jnp.mean((_apply(second, batch) - residual) ** 2)

  def train_step(first, first_state, second, second_state, count, batch):
    grads = ols.grad(loss_fn, first_state)(first, batch)
    first, first_state = apply_updates(TX, grads, first, first_state)
    second, second_state = lax.cond(
      count % 2 == 1,
      lambda: train(TX, residual_loss_fn, second, second_state, first, batch)[
        :2
      ],
      lambda: (second, second_state),
    )
    return first, first_state, second, second_state, count + 1

  return jit_step(train_step, OTHERS, TX.init(OTHERS), jnp.int32(1))
