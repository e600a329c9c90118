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


def _make_step(apply, batch, inner):
  net = hk.without_apply_rng(hk.transform(apply))
  loss_fn = lambda params, batch: mse(net.apply(params, batch[0]), batch[1])
  params = jax.jit(net.init)(jax.random.key(0), batch[0])
  tx = ols.with_loss_scaling(inner)
  return make_train_step(loss_fn, params, batch, tx=tx)


def mlp():
  apply = lambda x: hk.nets.MLP([HIDDEN, CLASSES])(x)
  return _make_step(apply, make_batch(), optax.adam(1e-2))


def lstm():
  """An LSTM that is unrolled by a scan, with gradients clipped by norm."""

  def apply(x):
    core = hk.LSTM(HIDDEN)
    state = core.initial_state(x.shape[0])
    x, _ = hk.dynamic_unroll(core, x, state, time_major=False)
    return hk.BatchApply(hk.Linear(CLASSES))(x)

  batch = normal(4, 6, 8, seed=1), normal(4, 6, CLASSES, seed=2)
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  return _make_step(apply, batch, inner)
