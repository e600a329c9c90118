"""Haiku: its own ResNet, and an LSTM that is unrolled by a scan."""

import haiku as hk
import jax
import jax.numpy as jnp

from helpers.float32_models import cross_entropy, Model, noisy_images


def resnet():
  def apply(images):
    net = hk.nets.ResNet(
      blocks_per_group=(1, 1, 1, 1),
      num_classes=10,
      bottleneck=False,
      channels_per_group=(16, 16, 32, 64),
      use_projection=(True,) * 4,
      logits_config={"w_init": None},  # Else zeros: no gradient behind them.
    )
    return net(images, is_training=True)

  net = hk.transform_with_state(apply)
  images = noisy_images(16, 64)
  params, state = jax.jit(net.init)(jax.random.key(0), images)

  def loss_fn(params, state, images, labels):
    logits, state = net.apply(params, state, None, images)
    return cross_entropy(logits, labels), state

  return Model(loss_fn, params, (state, images, jnp.arange(16) % 10))


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
