"""Faults of Haiku's layers."""

import haiku as hk
import jax
import jax.numpy as jnp

from helpers.planted_layers import batch, Model, WIDTH


def haiku_offset(fault):
  def apply(x):
    x = jnp.tanh(hk.Linear(WIDTH)(x))
    offset = hk.initializers.RandomNormal(WIDTH**-0.5, 10 if fault else 0)
    x = hk.Linear(WIDTH, w_init=offset)(x)  # planted
    x = hk.LayerNorm(-1, True, True)(x)
    return hk.nets.MLP([WIDTH, WIDTH])(x)

  net = hk.without_apply_rng(hk.transform(apply))
  x, y = batch()
  params = jax.jit(net.init)(jax.random.key(0), x)
  loss_fn = lambda params, x, y: jnp.mean((net.apply(params, x) - y) ** 2)
  return Model(loss_fn, (params, x, y))
