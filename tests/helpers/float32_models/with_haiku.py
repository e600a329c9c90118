"""Haiku: an LSTM that is unrolled by a scan."""

import haiku as hk
import jax
import jax.numpy as jnp

from helpers.float32_models import Model


def lstm():
  def apply(x):
    core = hk.DeepRNN([hk.LSTM(32), hk.LSTM(32)])
    states = core.initial_state(x.shape[0])
    x, _ = hk.dynamic_unroll(core, x, states, time_major=False)
    return hk.BatchApply(hk.Linear(8))(x)

  net = hk.without_apply_rng(hk.transform(apply))
  x = jax.random.normal(jax.random.key(0), (4, 12, 16))
  y = jax.random.normal(jax.random.key(1), (4, 12, 8))

  def loss_fn(params, x, y):
    predicted = net.apply(params, x)
    return jnp.mean((predicted - y) ** 2), predicted

  return Model(loss_fn, jax.jit(net.init)(jax.random.key(0), x), (x, y))
