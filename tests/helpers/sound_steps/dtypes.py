"""Steps with parameters and arithmetic in other dtypes."""

import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  init_mlp,
  make_batch,
  make_train_step,
  mse,
  mse_loss_fn,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def half_loss_fn(params, batch):
  """A model in float16, with a loss in float32."""
  params, x = optax.tree.cast((params, batch[0]), jnp.float16)
  return mse(apply_mlp(params, x).astype(jnp.float32), batch[1])


def _make_step_without_autocast(tx, params, loss_fn=half_loss_fn):
  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step, (params, tx.init(params), make_batch())


def casts_by_hand():
  """Parameters in float32, cast in the loss."""
  return _make_step_without_autocast(ols.with_loss_scaling(ADAM), init_mlp())


def float16_params():
  """Parameters in float16, and a learning rate that moves them."""
  params = optax.tree.cast(init_mlp(), jnp.float16)
  return _make_step_without_autocast(ols.with_loss_scaling(ADAM), params)


def float32_master_copies():
  """Float16 gradients of float16 copies; updates of the copies in float32."""
  tx = ols.with_loss_scaling(ADAM)

  @jax.jit
  def train_step(master_params, opt_state, batch):
    half_params = optax.tree.cast(master_params, jnp.float16)
    loss, grads = ols.value_and_grad(half_loss_fn, opt_state)(
      half_params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, master_params)
    master_params = optax.apply_updates(master_params, updates)
    return master_params, opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def master_copies_beside_params():
  """Both copies are results; the model reads the float16 ones."""
  tx = ols.with_loss_scaling(ADAM, grads_are_scaled=True)

  @jax.jit
  def train_step(half_params, master_params, opt_state, batch):
    def scaled_loss_fn(params):
      loss = half_loss_fn(params, batch)
      return ols.scale_loss(loss, opt_state), loss

    (_, loss), grads = jax.value_and_grad(scaled_loss_fn, has_aux=True)(
      half_params
    )
    updates, opt_state = tx.update(grads, opt_state, master_params)
    master_params = optax.apply_updates(master_params, updates)
    half_params = optax.tree.cast(master_params, jnp.float16)
    return half_params, master_params, opt_state, loss

  params = init_mlp()
  half_params = optax.tree.cast(params, jnp.float16)
  return train_step, (half_params, params, tx.init(params), make_batch())


def mixed_params():
  """Matrices in float16, biases in float32."""
  params = jax.tree.map(
    lambda p: p.astype(jnp.float16) if p.ndim > 1 else p, init_mlp()
  )
  return _make_step_without_autocast(ols.with_loss_scaling(ADAM), params)


def bfloat16():
  """A fixed scale of 1 only skips."""
  tx = ols.with_loss_scaling(ADAM, 1.0)
  loss_fn = ols.autocast(mse_loss_fn, jnp.bfloat16)
  return _make_step_without_autocast(tx, init_mlp(), loss_fn)


def bfloat16_params():
  tx = ols.with_loss_scaling(optax.sgd(0.1), ols.FixedLossScale(1.0))
  params = optax.tree.cast(init_mlp(), jnp.bfloat16)

  def loss_fn(params, batch):
    out = apply_mlp(params, batch[0].astype(jnp.bfloat16))
    return mse(out.astype(jnp.float32), batch[1])

  return _make_step_without_autocast(tx, params, loss_fn)


def x64():
  """Float32 parameters and inputs where JAX's default is float64."""
  x, y = make_batch()
  mean = jnp.mean(x.astype(jnp.float64), 0)
  x = (x - mean).astype(jnp.float32)
  return make_train_step(ols.with_loss_scaling(ADAM), batch=(x, y))
