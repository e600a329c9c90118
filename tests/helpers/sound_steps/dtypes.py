"""Steps with parameters and arithmetic in other dtypes."""

import jax.numpy as jnp
import numpy as np
import optax

from helpers.train_steps import (
  BATCH,
  compute_scaled_grads,
  half_loss_fn,
  make_step,
  PARAMS,
  prepare_step,
  prepare_two_layers,
  two_layers_loss_fn,
)
import optax_lossscale as ols

ADAM = optax.adam(1e-2)


def _cast_params(params, dtype=jnp.float16):
  return {name: np.asarray(x, dtype) for name, x in params.items()}


def _mixed_loss_fn(params, batch):
  """The bias is in float32, and the matrix is not."""
  bias = params["bias"].astype(jnp.float16)
  hidden = batch.astype(jnp.float16) @ params["w"] + bias
  return jnp.mean((hidden.astype(jnp.float32) - 1) ** 2)


def x64():
  """Float32 parameters and inputs where JAX's default is float64."""
  mean = jnp.mean(jnp.asarray(BATCH, jnp.float64), 0)
  return make_step(inner=ADAM, batch=(BATCH - mean).astype(jnp.float32))


def _compute_half_grads(loss, master_params, opt_state):
  half_params = optax.tree.cast(master_params, jnp.float16)
  return ols.grad(loss, opt_state)(half_params)


def master_copies_beside_params():
  """Both copies are results; the model reads the float16 ones."""
  tx = ols.with_loss_scaling(ADAM, grads_are_scaled=True)

  def train_step(half_params, master_params, opt_state, batch):
    loss = lambda params: half_loss_fn(params, batch)
    grads = compute_scaled_grads(loss, half_params, opt_state)
    updates, opt_state = tx.update(grads, opt_state, master_params)
    master_params = optax.apply_updates(master_params, updates)
    half_params = optax.tree.cast(master_params, jnp.float16)
    return half_params, master_params, opt_state

  return train_step, (_cast_params(PARAMS), PARAMS, tx.init(PARAMS), BATCH)


STEPS = {
  "float16_params": prepare_step(
    loss_fn=half_loss_fn, inner=ADAM, params=_cast_params(PARAMS)
  ),
  "mixed_params": prepare_step(
    loss_fn=_mixed_loss_fn,
    inner=ADAM,
    params={**_cast_params(PARAMS), "bias": np.zeros(4, np.float32)},
  ),
  "bfloat16_params": prepare_step(
    loss_fn=half_loss_fn,
    params=_cast_params(PARAMS, jnp.bfloat16),
    policy=ols.FixedLossScale(1.0),
  ),
  # A fixed scale of 1 only skips.
  "bfloat16": prepare_two_layers(
    loss_fn=ols.autocast(two_layers_loss_fn, jnp.bfloat16),
    inner=ADAM,
    policy=1.0,
  ),
  "float32_layer": prepare_two_layers(
    loss_fn=ols.autocast(two_layers_loss_fn, keep_float32="head")
  ),
  # Float16 gradients of float16 copies; updates of the copies in float32.
  "float32_master_copies": prepare_step(
    _compute_half_grads, loss_fn=half_loss_fn, inner=ADAM
  ),
}
