"""Steps under JAX's transformations, and with its effects."""

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  dense,
  init_mlp,
  jit_step,
  make_batch,
  make_train_step,
  mse,
  mse_loss_fn,
  train,
  train_with_aux,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adam(1e-2))


def jitted_loss_only():
  """The optimizer runs outside of ``jit``."""
  jit_loss = lambda loss_fn: jax.jit(ols.autocast(loss_fn))
  step, args = make_train_step(TX, cast=jit_loss)
  return step.__wrapped__, args


def state_in_a_dict():
  """Everything that is trained is one pytree of the user's."""

  @jax.jit
  def train_step(state, batch):
    params, opt_state, loss = train(
      TX, mse_loss_fn, state["params"], state["opt_state"], batch
    )
    count = state["count"] + 1
    return {"params": params, "opt_state": opt_state, "count": count}, loss

  params = init_mlp()
  opt_state, count = TX.init(params), jnp.int32(0)
  state = {"params": params, "opt_state": opt_state, "count": count}
  return train_step, (state, make_batch())


def two_updates_per_step():
  """Two batches, one after the other, in one compiled call."""
  step, (params, opt_state, _) = make_train_step(TX)

  @jax.jit
  def train_twice(params, opt_state, batches):
    for batch in batches:
      params, opt_state, loss = step(params, opt_state, batch)
    return params, opt_state, loss

  x, y = make_batch(16)
  return train_twice, (params, opt_state, [(x[:8], y[:8]), (x[8:], y[8:])])


def auxiliary_outputs():
  """Outputs and metrics come with the loss, and are not scaled."""

  def loss_fn(params, batch):
    out = apply_mlp(params, batch[0])
    mae = jnp.mean(jnp.abs(out - batch[1]))
    return mse(out, batch[1]), {"out": out, "mae": mae}

  def train_step(params, opt_state, batch):
    params, opt_state, aux = train_with_aux(
      TX, loss_fn, params, opt_state, batch
    )
    return params, opt_state, aux["mae"]

  return jit_step(train_step, TX)


def checkpointed_layers():
  """Activations are computed again in the backward pass."""

  def loss_fn(params, batch):
    x = batch[0]
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(
      lambda w, x: jnp.tanh(x @ w["w"] + w["b"]), policy=policy
    )
    for name in ("layer_0", "layer_1"):
      x = layer(params[name], x)
    return mse(apply_mlp({"layer_0": params["layer_2"]}, x), batch[1])

  return make_train_step(TX, loss_fn, init_mlp((8, 16, 16, 4)))


@jax.custom_vjp
def _linear(x, w):
  return x @ w


_linear.defvjp(
  lambda x, w: (x @ w, (x, w)),
  lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g),
)


def custom_vjp_matmul():
  """A linear layer whose backward pass has its own matmuls."""

  def loss_fn(params, batch):
    hidden = jnp.tanh(_linear(batch[0], params["up"]))
    return mse(_linear(hidden, params["down"]), batch[1])

  params = {"up": dense(8, 16), "down": dense(16, 4, seed=1)}
  return make_train_step(TX, loss_fn, params)


def debug_print():
  """The loss is printed from inside of the loss function."""

  def loss_fn(params, batch):
    loss = mse_loss_fn(params, batch)
    jax.debug.print("loss {}", loss)
    return loss

  return make_train_step(TX, loss_fn)


def logging_callback():
  """The host receives the loss and the scale of each step, in order."""
  history = []

  def train_step(params, opt_state, batch):
    params, opt_state, loss = train(TX, mse_loss_fn, params, opt_state, batch)
    scale = ols.get_loss_scale_state(opt_state).loss_scale
    log = lambda *values: history.append([float(x) for x in values])
    io_callback(log, None, loss, scale, ordered=True)
    return params, opt_state, loss

  return jit_step(train_step, TX)


def random_augmentation():
  """Noise on the inputs, and a new random key among the results."""

  def train_step(params, opt_state, key, batch):
    key, noise_key = jax.random.split(key)
    noise = 0.1 * jax.random.normal(noise_key, batch[0].shape)
    batch = batch[0] + noise, batch[1]
    return *train(TX, mse_loss_fn, params, opt_state, batch), key

  return jit_step(train_step, TX, jax.random.key(0))
