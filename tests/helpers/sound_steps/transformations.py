"""Steps under JAX's transformations, and with its effects."""

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import optax

from helpers.train_steps import (
  jit_step,
  loss_fn,
  prepare_result,
  prepare_step,
  train,
)
import optax_lossscale as ols


def two_updates_per_step():
  """Two batches, one after the other, in one compiled call."""

  def train_twice(params, opt_state, batch):
    for part in jnp.split(batch, 2):
      params, opt_state = train(params, opt_state, part)
    return params, opt_state

  return jit_step(train_twice)


def random_augmentation():
  """Noise on the inputs, and a new random key among the results."""

  def train_step(params, opt_state, key, batch):
    key, noise_key = jax.random.split(key)
    batch += 0.1 * jax.random.normal(noise_key, batch.shape)
    return *train(params, opt_state, batch), key

  return jit_step(train_step, jax.random.key(0))


def _printing_loss_fn(params, batch):
  loss = jnp.mean((batch @ params["w"]) ** 2)
  jax.debug.print("loss {}", loss)
  return loss


def _log_norm_and_scale(old, new):
  """The host receives numbers of each step, in order."""
  history = []
  scale = ols.get_loss_scale_state(new).loss_scale
  log = lambda *values: history.append([float(x) for x in values])
  io_callback(log, None, optax.tree.norm(new[0]), scale, ordered=True)
  return new


STEPS = {
  # The optimizer runs outside of ``jit``.
  "jitted_loss_only": prepare_step(
    loss_fn=jax.jit(loss_fn), wrap=lambda step: step
  ),
  "debug_print": prepare_step(loss_fn=ols.autocast(_printing_loss_fn)),
  "logging_callback": prepare_result(_log_norm_and_scale),
}
