"""Faults of the layers of libraries."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from helpers.planted_layers import make_batch, Model, WIDTH


class LinenBlock(nn.Module):
  fault: bool

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(WIDTH)(x))
    kernel = nn.initializers.lecun_normal()
    shifted_init = lambda *args: kernel(*args) + (10 if self.fault else 0)
    x = nn.Dense(WIDTH, kernel_init=shifted_init)(x)  # planted
    return nn.LayerNorm()(x)


def linen_scan(fault):
  class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return LinenBlock(fault)(x), None

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.tanh(nn.Dense(WIDTH)(x))
      options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
      step = nn.scan(Step, length=3, **options)
      x, _ = step()(x, None)
      return nn.Dense(WIDTH)(x)

  net, (x, y) = Net(), make_batch()
  params = jax.jit(net.init)(jax.random.key(0), x)
  loss_fn = lambda params, x, y: jnp.mean((net.apply(params, x) - y) ** 2)
  return Model(loss_fn, (params, x, y))


class NnxNet(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x = nnx.tanh(self.first(x))
    x = self.second(x)  # planted
    return self.last(self.norm(x))


def nnx_offset(fault):
  model = NnxNet(nnx.Rngs(0))
  model.second.kernel[...] += 10 if fault else 0
  args = model, *make_batch()
  loss_fn = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
  return Model(loss_fn, args, value_and_grad_fn=nnx.value_and_grad, jit=nnx.jit)
