"""Steps with Haiku, whose models are pairs of functions."""

import haiku as hk
import jax
import optax

from helpers.sound_steps import (
  CLASSES,
  HIDDEN,
  make_batch,
  make_train_step,
  mse,
  normal,
)
import optax_lossscale as ols


def mlp():
  net = hk.without_apply_rng(
    hk.transform(lambda x: hk.nets.MLP([HIDDEN, CLASSES])(x))
  )
  loss_fn = lambda params, batch: mse(net.apply(params, batch[0]), batch[1])
  x, y = make_batch()
  params = jax.jit(net.init)(jax.random.key(0), x)
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  return make_train_step(tx, loss_fn, params, (x, y))


def batch_norm():
  """The state of the model is an argument and a result."""

  def apply(x):
    x = hk.BatchNorm(True, True, 0.9)(hk.Linear(HIDDEN)(x), is_training=True)
    return hk.Linear(CLASSES)(jax.nn.relu(x))

  net = hk.without_apply_rng(hk.transform_with_state(apply))
  tx = ols.with_loss_scaling(optax.adam(1e-2))

  def loss_fn(params, model_state, batch):
    out, model_state = net.apply(params, model_state, batch[0])
    return mse(out, batch[1]), model_state

  @jax.jit
  def train_step(params, model_state, opt_state, batch):
    (loss, new_state), grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, has_aux=True
    )(params, model_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    model_state = ols.select_if_finite(opt_state, new_state, model_state)
    return params, model_state, opt_state, loss

  x, y = make_batch()
  params, model_state = jax.jit(net.init)(jax.random.key(0), x)
  return train_step, (params, model_state, tx.init(params), (x, y))


def lstm():
  """An LSTM that is unrolled by a scan, with gradients clipped by norm."""

  def apply(x):
    core = hk.LSTM(HIDDEN)
    state = core.initial_state(x.shape[0])
    x, _ = hk.dynamic_unroll(core, x, state, time_major=False)
    return hk.BatchApply(hk.Linear(CLASSES))(x)

  net = hk.without_apply_rng(hk.transform(apply))
  loss_fn = lambda params, batch: mse(net.apply(params, batch[0]), batch[1])
  batch = normal(4, 6, 8, seed=1), normal(4, 6, CLASSES, seed=2)
  params = jax.jit(net.init)(jax.random.key(0), batch[0])
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  return make_train_step(ols.with_loss_scaling(inner), loss_fn, params, batch)
