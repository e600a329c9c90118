"""Steps that use the options of this package, around one small model."""

import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  jit_step,
  make_train_step,
  mse_loss_fn,
  train,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def _make_adam_step(*args, **kwargs):
  return make_train_step(ols.with_loss_scaling(ADAM, *args, **kwargs))


def dynamic_options():
  return _make_adam_step(
    ols.DynamicLossScale(2.0**12, growth_interval=100, min_scale=2**-8)
  )


def monitored():
  """Statistics of all steps, skipped ones as well, around the wrapper."""
  norms = optax.monitor(
    {"grad_norm": lambda updates, **_: optax.tree.norm(updates)}
  )
  return make_train_step(optax.chain(norms, ols.with_loss_scaling(ADAM)))


def float32_layer():
  """One layer is named, and stays in float32."""
  return make_train_step(
    ols.with_loss_scaling(ADAM),
    cast=lambda loss_fn: ols.autocast(loss_fn, keep_float32="layer_1"),
  )


def finite_loss_required():
  """A step whose loss is not finite is skipped, too."""
  tx = ols.with_loss_scaling(ADAM)

  def train_step(params, opt_state, batch):
    finite = jnp.isfinite(ols.autocast(mse_loss_fn)(params, batch))
    return train(tx, mse_loss_fn, params, opt_state, batch, grads_finite=finite)

  return jit_step(train_step, tx)


def logged():
  """Metrics of the loss scale, and NaN as the loss of a skipped step."""
  tx = ols.with_loss_scaling(ADAM)

  def train_step(params, opt_state, batch):
    params, opt_state, loss = train(tx, mse_loss_fn, params, opt_state, batch)
    loss = ols.select_if_finite(opt_state, loss, jnp.full_like(loss, jnp.nan))
    metrics = ols.loss_scale_metrics(opt_state, policy="dynamic")
    return params, opt_state, metrics | {"loss": loss}

  return jit_step(train_step, tx)
