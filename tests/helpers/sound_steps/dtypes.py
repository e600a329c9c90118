"""Steps with parameters and arithmetic in other dtypes."""

import functools

import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  init_mlp,
  jit_step,
  make_batch,
  make_train_step,
  mse,
  no_cast,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def half_loss_fn(params, batch, dtype=jnp.float16):
  """A model in half precision, with a loss in float32."""
  params, x = optax.tree.cast((params, batch[0]), dtype)
  return mse(apply_mlp(params, x).astype(jnp.float32), batch[1])


def _make_half_step(params, tx=None, loss_fn=half_loss_fn):
  tx = tx or ols.with_loss_scaling(ADAM)
  return make_train_step(tx, loss_fn, params, cast=no_cast)


def casts_by_hand():
  """Parameters in float32, cast in the loss."""
  return _make_half_step(init_mlp())


def float16_params():
  """Parameters in float16, and a learning rate that moves them."""
  return _make_half_step(optax.tree.cast(init_mlp(), jnp.float16))


def mixed_params():
  """Matrices in float16, biases in float32."""
  return _make_half_step(
    jax.tree.map(
      lambda p: p.astype(jnp.float16) if p.ndim > 1 else p, init_mlp()
    )
  )


def bfloat16_params():
  return _make_half_step(
    optax.tree.cast(init_mlp(), jnp.bfloat16),
    ols.with_loss_scaling(optax.sgd(0.1), ols.FixedLossScale(1.0)),
    functools.partial(half_loss_fn, dtype=jnp.bfloat16),
  )


def bfloat16():
  """A fixed scale of 1 only skips."""
  return make_train_step(
    ols.with_loss_scaling(ADAM, 1.0),
    cast=lambda loss_fn: ols.autocast(loss_fn, jnp.bfloat16),
  )


def x64():
  """Float32 parameters and inputs where JAX's default is float64."""
  x, y = make_batch()
  mean = jnp.mean(x.astype(jnp.float64), 0)
  x = (x - mean).astype(jnp.float32)
  return make_train_step(ols.with_loss_scaling(ADAM), batch=(x, y))


def float32_master_copies():
  """Float16 gradients of float16 copies; updates of the copies in float32."""
  tx = ols.with_loss_scaling(ADAM)

  def train_step(master_params, opt_state, batch):
    half_params = optax.tree.cast(master_params, jnp.float16)
    grads = ols.grad(half_loss_fn, opt_state)(half_params, batch)
    updates, opt_state = tx.update(grads, opt_state, master_params)
    return optax.apply_updates(master_params, updates), opt_state

  return jit_step(train_step, tx)


def master_copies_beside_params():
  """Both copies are results; the model reads the float16 ones."""
  tx = ols.with_loss_scaling(ADAM, grads_are_scaled=True)

  @jax.jit
  def train_step(half_params, master_params, opt_state, batch):
    scaled_loss_fn = lambda p: ols.scale_loss(half_loss_fn(p, batch), opt_state)
    grads = jax.grad(scaled_loss_fn)(half_params)
    updates, opt_state = tx.update(grads, opt_state, master_params)
    master_params = optax.apply_updates(master_params, updates)
    half_params = optax.tree.cast(master_params, jnp.float16)
    return half_params, master_params, opt_state

  params = init_mlp()
  half_params = optax.tree.cast(params, jnp.float16)
  return train_step, (half_params, params, tx.init(params), make_batch())
