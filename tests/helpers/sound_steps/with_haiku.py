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
