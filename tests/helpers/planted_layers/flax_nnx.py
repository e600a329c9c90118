"""Faults of Flax NNX's layers."""

from flax import nnx
import jax.numpy as jnp

from helpers.planted_layers import batch, Model, WIDTH


class Net(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x = nnx.tanh(self.first(x))
    x = self.second(x)  # planted
    return self.last(self.norm(x))


def loss_fn(model, x, y):
  return jnp.mean((model(x) - y) ** 2)


def nnx_offset(fault):
  model = Net(nnx.Rngs(0))
  model.second.kernel[...] += 10 if fault else 0
  args = model, *batch()
  return Model(loss_fn, args, using=nnx.value_and_grad, jit=nnx.jit)
