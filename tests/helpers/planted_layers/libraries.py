"""Faults of the layers of libraries."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.

import equinox as eqx
from flax import linen as nn
from flax import nnx
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import keras

from helpers.planted_layers import make_batch, Model, WIDTH


def make_module_model(
  module, x, y, change_params=lambda params: params, scope=None
):
  params = jax.jit(module.init)(jax.random.key(0), x)
  loss_fn = lambda params, x, y: jnp.mean((module.apply(params, x) - y) ** 2)
  return Model(loss_fn, (change_params(params), x, y), scope=scope)


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

  def change_params(params):
    attention_params = params["params"]["attention"]
    for name in ("query", "key") if fault else ():
      attention_params[name]["kernel"] *= 400
    return params

  x, y = (a.reshape(4, 8, WIDTH) for a in make_batch())
  return make_module_model(
    Net(), x, y, change_params, "Net/attention/...qhd,...khd->...hqk"
  )


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

  return make_module_model(Net(), *make_batch())


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


def haiku_offset(fault):
  def apply(x):
    x = jnp.tanh(hk.Linear(WIDTH)(x))
    offset = hk.initializers.RandomNormal(WIDTH**-0.5, 10 if fault else 0)
    x = hk.Linear(WIDTH, w_init=offset)(x)  # planted
    x = hk.LayerNorm(-1, True, True)(x)
    return hk.nets.MLP([WIDTH, WIDTH])(x)

  return make_module_model(
    hk.without_apply_rng(hk.transform(apply)), *make_batch()
  )


def keras_offset(fault):
  keras.utils.set_random_seed(0)
  model = keras.Sequential(
    [
      keras.layers.Input((WIDTH,)),
      keras.layers.Dense(WIDTH, activation="tanh"),
      keras.layers.Dense(WIDTH, name="bad"),
      keras.layers.LayerNormalization(),
      keras.layers.Dense(WIDTH, activation="gelu"),
      keras.layers.Dense(WIDTH),
    ],
    name="net",
  )
  bad = model.get_layer("bad").kernel
  bad.assign(bad.value + 20 * fault)

  def loss_fn(params, others, x, y):
    predicted, _ = model.stateless_call(params, others, x)  # planted
    return jnp.mean((predicted - y) ** 2)

  params = [v.value for v in model.trainable_variables]
  others = [v.value for v in model.non_trainable_variables]
  return Model(loss_fn, (params, others, *make_batch()), scope="bad")
