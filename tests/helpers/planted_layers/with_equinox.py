"""Faults of Equinox's layers."""

import equinox as eqx
import jax
from jax import lax
import jax.numpy as jnp

from helpers.planted_layers import batch, Model, WIDTH


def loss_fn(model, x, y):
  return jnp.mean((jax.vmap(model)(x) - y) ** 2)


class Block(eqx.Module):
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
  blocks: Block
  last: eqx.nn.Linear

  def __call__(self, x):
    arrays, rest = eqx.partition(self.blocks, eqx.is_array)
    step = lambda x, block: (eqx.combine(block, rest)(x), None)
    return self.last(lax.scan(step, x, arrays)[0])


def equinox_scan(fault):
  """Blocks in a scan, each under a checkpoint of Equinox."""
  keys = jax.random.split(jax.random.key(0), 3)
  blocks = eqx.filter_vmap(lambda key: Block(key, 10.0 if fault else 0.0))(keys)
  last = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(5))
  args = Stack(blocks, last), *batch()
  return Model(
    loss_fn, args, using=eqx.filter_value_and_grad, jit=eqx.filter_jit
  )
