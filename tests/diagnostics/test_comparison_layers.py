"""Layers are told apart in any library, and the one at fault alone is kept."""

import functools
import os

import equinox as eqx
from flax import nnx
from helpers import quick_alone
from helpers.planted_layers import batch, normal, normalized, WIDTH
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.diagnostics import compare_precision, precision_report

COUNT = 4
BAD = 1
SIZE = 1e6  # of weights in front of a norm
SCALE = ols.FixedLossScale(2.0**6).init()


def product(x, w):
  """All products of a project may stand on one line."""
  return x @ w


def block(params, x):
  x = x + product(normalized(product(x, params["up"])), params["down"])
  return jnp.tanh(x)


@jax.custom_vjp
def ruled(params, x):
  return block(params, x)


ruled.defvjp(
  lambda params, x: jax.vjp(block, params, x), lambda pull_back, g: pull_back(g)
)


def plain_jax(wrap):
  layers = [
    {
      "up": normal(WIDTH, WIDTH, seed=i),
      "down": normal(WIDTH, WIDTH, seed=9 + i),
    }
    for i in range(COUNT)
  ]
  layers[BAD]["up"] *= SIZE
  layer = wrap(block)

  def net(params, x):
    for its_params in params["layers"]:
      x = layer(its_params, x)
    return x @ params["head"]

  return net, {"layers": layers, "head": normal(WIDTH, WIDTH)}


class Einsum(nnx.Module):
  def __init__(self, seed, size=1.0):
    self.w = nnx.Param(size * normal(WIDTH, WIDTH, seed=seed))

  def __call__(self, x):
    return jnp.einsum("bi,ij->bj", x, self.w[...])


class Block(nnx.Module):
  def __init__(self, i):
    self.up = Einsum(i, SIZE if i == BAD else 1.0)
    self.down = Einsum(9 + i)

  def __call__(self, x):
    return jnp.tanh(x + self.down(normalized(self.up(x))))


class Net(nnx.Module):
  def __init__(self):
    self.layers = nnx.List([Block(i) for i in range(COUNT)])

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def with_nnx():
  graph, state = nnx.split(Net())
  return lambda state, x: nnx.merge(graph, state)(x), state


def with_equinox():
  model = eqx.nn.MLP(
    WIDTH,
    WIDTH,
    WIDTH,
    COUNT,
    activation=lambda x: x / jnp.sqrt(1 + x * x),
    key=jax.random.key(0),
  )
  where = lambda m: m.layers[BAD].weight
  model = eqx.tree_at(where, model, replace_fn=lambda w: SIZE * w)
  params, static = eqx.partition(model, eqx.is_array)
  return lambda p, x: jax.vmap(eqx.combine(p, static))(x), params


def with_keras():
  os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.
  import keras

  keras.utils.set_random_seed(0)
  layers = []
  for i in range(COUNT):
    layers += [keras.layers.Dense(WIDTH, name=f"dense_{i}")]
    layers += [keras.layers.LayerNormalization()]
  model = keras.Sequential(layers)
  model.build((None, WIDTH))
  kernel = model.get_layer(f"dense_{BAD}").kernel
  kernel.assign(SIZE * kernel)
  others = [v.value for v in model.non_trainable_variables]
  net = lambda params, x: model.stateless_call(params, others, x)[0]
  return net, [v.value for v in model.trainable_variables]


PROGRAMS = {
  "plain JAX": functools.partial(plain_jax, lambda block: block),
  "one jit": functools.partial(plain_jax, jax.jit),
  "checkpoint": functools.partial(plain_jax, jax.checkpoint),
  "custom_vjp": functools.partial(plain_jax, lambda block: ruled),
  "vmap": functools.partial(plain_jax, lambda f: jax.vmap(f, (None, 0))),
  "Flax NNX with one helper": with_nnx,
  "Equinox": with_equinox,
  "Keras": with_keras,
}


def share_in_half(trained, *args):
  rows = precision_report(trained, *args).flops
  return sum(row.share for row in rows if row.operands == "float16")


@pytest.mark.parametrize(
  "name", quick_alone(["Flax NNX with one helper"], PROGRAMS)
)
def test_keeping_what_overflows_cures_and_leaves_the_rest_in_half(name):
  net, params = PROGRAMS[name]()
  x, y = batch()
  loss_fn = lambda params: jnp.mean((net(params, x) - y) ** 2)

  def trained(**kwargs):
    return ols.grad(ols.autocast(loss_fn, **kwargs), SCALE)

  report = compare_precision(trained(), params, progress=False)
  assert not np.isfinite(report.error)
  assert len(report.overflowing) == 1
  names = report.overflowing + report.standing_out
  cured = trained(keep_float32=names)
  assert compare_precision(cured, params, progress=False).error < 0.02
  before = share_in_half(trained(), params)
  assert share_in_half(cured, params) > 0.6 * before
