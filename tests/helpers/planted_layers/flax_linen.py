"""Faults of Flax linen's layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from helpers.planted_layers import batch, Model, WIDTH


def model_of(module, x, y, change=lambda params: params, scope=None):
  params = jax.jit(module.init)(jax.random.key(0), x)
  loss_fn = lambda params, x, y: jnp.mean((module.apply(params, x) - y) ** 2)
  return Model(loss_fn, (change(params), x, y), scope=scope)


def linen_attention(fault):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(WIDTH)(x)
      y = nn.LayerNorm()(x)
      attention = nn.MultiHeadDotProductAttention(4, name="attention")
      x = x + attention(y)  # planted
      x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(nn.LayerNorm()(x))))
      return nn.Dense(WIDTH)(x)

  def change(params):
    inside = params["params"]["attention"]
    for name in ("query", "key") if fault else ():
      inside[name]["kernel"] *= 400
    return params

  x, y = (a.reshape(4, 8, WIDTH) for a in batch())
  return model_of(Net(), x, y, change, "Net/attention/...qhd,...khd->...hqk")


class Block(nn.Module):
  fault: bool

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(WIDTH)(x))
    kernel = nn.initializers.lecun_normal()
    shifted = lambda *args: kernel(*args) + (10 if self.fault else 0)
    x = nn.Dense(WIDTH, kernel_init=shifted)(x)  # planted
    return nn.LayerNorm()(x)


def linen_remat(fault):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.tanh(nn.Dense(WIDTH)(x))
      x = nn.remat(Block)(fault)(x)
      return nn.Dense(WIDTH)(x)

  return model_of(Net(), *batch())


def linen_scan(fault):
  class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return Block(fault)(x), None

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.tanh(nn.Dense(WIDTH)(x))
      rngs = {"params": True}
      step = nn.scan(
        Step, variable_axes={"params": 0}, split_rngs=rngs, length=3
      )
      x, _ = step()(x, None)
      return nn.Dense(WIDTH)(x)

  return model_of(Net(), *batch())
