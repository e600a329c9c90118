"""Faults of the layers of libraries."""

import equinox as eqx
from flax import linen as nn
from flax import nnx
import jax
from jax import lax
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


class EquinoxBlock(eqx.Module):
  first: eqx.nn.Linear
  second: eqx.nn.Linear
  norm: eqx.nn.LayerNorm

  def __init__(self, key, offset):
    keys = jax.random.split(key)
    self.first = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
    second = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
    self.second = eqx.tree_at(
      lambda layer: layer.weight, second, replace_fn=lambda w: w + offset
    )
    self.norm = eqx.nn.LayerNorm(WIDTH)

  @eqx.filter_checkpoint
  def __call__(self, x):
    x = jnp.tanh(self.first(x))
    x = self.second(x)  # planted
    return self.norm(x)


class Stack(eqx.Module):
  blocks: EquinoxBlock
  last: eqx.nn.Linear

  def __call__(self, x):
    arrays, static = eqx.partition(self.blocks, eqx.is_array)
    step = lambda x, block: (eqx.combine(block, static)(x), None)
    return self.last(lax.scan(step, x, arrays)[0])


def equinox_scan(fault):
  """Blocks in a scan, each under a checkpoint of Equinox."""
  keys = jax.random.split(jax.random.key(0), 3)
  make = lambda key: EquinoxBlock(key, 10.0 if fault else 0.0)
  last = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(5))
  args = Stack(eqx.filter_vmap(make)(keys), last), *make_batch()
  loss_fn = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
  value_and_grad_fn = eqx.filter_value_and_grad
  return Model(
    loss_fn, args, value_and_grad_fn=value_and_grad_fn, jit=eqx.filter_jit
  )
