"""Steps that use the options of this package, around one small model."""

import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  init_mlp,
  make_batch,
  make_train_step,
  mse_loss_fn,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def dynamic_options():
  policy = ols.DynamicLossScale(2.0**12, growth_interval=100, min_scale=2**-8)
  return make_train_step(ols.with_loss_scaling(ADAM, policy))


def headroom():
  return make_train_step(
    ols.with_loss_scaling(ADAM, ols.HeadroomLossScale(margin=2))
  )


def fixed():
  return make_train_step(ols.with_loss_scaling(ADAM, 1024.0))


def clipped_by_max_norm():
  return make_train_step(ols.with_loss_scaling(ADAM, max_norm=0.1))


def checked_updates():
  return make_train_step(ols.with_loss_scaling(ADAM, check_updates=True))


def monitored():
  """Statistics of all steps, skipped ones as well, around the wrapper."""
  norms = optax.monitor(
    {"grad_norm": lambda updates, **_: optax.tree.norm(updates)}
  )
  tx = optax.chain(norms, ols.with_loss_scaling(ADAM))
  return make_train_step(tx)


def _make_custom_step(differentiate, **kwargs):
  tx = ols.with_loss_scaling(ADAM, **kwargs)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads, update_kwargs = differentiate(params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, **update_kwargs)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())


def _scaled_value_and_grad(params, opt_state, batch):
  def scaled_loss_fn(params):
    loss = ols.autocast(mse_loss_fn)(params, batch)
    return ols.scale_loss(loss, opt_state), loss

  (_, loss), grads = jax.value_and_grad(scaled_loss_fn, has_aux=True)(params)
  return loss, grads


def scaled_and_unscaled_by_hand():
  def differentiate(params, opt_state, batch):
    loss, grads = _scaled_value_and_grad(params, opt_state, batch)
    return loss, ols.unscale_grads(grads, opt_state), {}

  return _make_custom_step(differentiate)


def scaled_grads():
  """A library differentiates, and ``update`` unscales the gradients."""

  def differentiate(params, opt_state, batch):
    return *_scaled_value_and_grad(params, opt_state, batch), {}

  return _make_custom_step(differentiate, grads_are_scaled=True, max_norm=1.0)


def finite_loss_required():
  """A step whose loss is not finite is skipped, too."""

  def differentiate(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    return loss, grads, {"grads_finite": jnp.isfinite(loss)}

  return _make_custom_step(differentiate)


def float32_layer():
  """One layer is named, and stays in float32."""

  def differentiate(params, opt_state, batch):
    loss_fn = ols.autocast(mse_loss_fn, keep_float32="layer_1")
    return *ols.value_and_grad(loss_fn, opt_state)(params, batch), {}

  return _make_custom_step(differentiate)


def logged():
  """Metrics of the loss scale, and NaN as the loss of a skipped step."""
  tx = ols.with_loss_scaling(ADAM)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    updates, opt_state = tx.update(grads, opt_state, params)
    loss = ols.select_if_finite(opt_state, loss, jnp.full_like(loss, jnp.nan))
    metrics = ols.loss_scale_metrics(opt_state, policy="dynamic")
    grad_norm = optax.tree.norm(grads)
    metrics |= {"loss": loss, "grad_norm": grad_norm}
    return optax.apply_updates(params, updates), opt_state, metrics

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch())
