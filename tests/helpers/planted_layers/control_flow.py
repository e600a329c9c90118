"""Faults inside of what holds a function."""

import jax
from jax import lax
import jax.numpy as jnp

from helpers.planted_layers import (
  make_batch,
  make_weights,
  Model,
  normal,
  WIDTH,
)
from helpers.planted_layers.plain_jax import (
  make_network,
  SHIFT,
  subtract,
)


def in_scan_of_checkpoints(fault):
  """Three layers by a scan, each with a sound matmul and a bad one."""

  @jax.checkpoint
  def block(ws, x):
    x = jnp.tanh(x @ ws["a"])
    return jnp.tanh(subtract(ws["w"], x, fault))

  def loss_fn(params, x, y):
    layers, outer_weights = params
    x = jnp.tanh(x @ outer_weights["first"])
    x, _ = lax.scan(lambda x, ws: (block(ws, x), None), x, layers)
    return jnp.mean((x @ outer_weights["last"] - y) ** 2)

  draw = lambda seed: normal(3, WIDTH, WIDTH, seed=seed)
  params = {"a": draw(20), "w": draw(21)}, make_weights("first", "last")
  return Model(loss_fn, (params, *make_batch()))


def in_cond(fault):
  def layer(params, x):
    bad = lambda x: subtract(params["w"], x, fault)
    good = lambda x: x @ params["w"]
    return lax.cond(jnp.sum(x) < 1e9, bad, good, x)

  return Model(*make_network(layer, "w"))


def in_while(fault):
  """Forward alone: a loop of unknown length has no gradient."""

  def fun(params, x):
    def step(state):
      i, x = state
      x = jnp.tanh(x @ params["first"])
      return i + 1, jnp.tanh(subtract(params["w"], x, fault))

    _, x = lax.while_loop(lambda state: state[0] < 3, step, (0, x))
    return x @ params["last"]

  args = make_weights("first", "w", "last"), make_batch()[0]
  return Model(fun, args, value_and_grad_fn=None)


def in_vmap(fault):
  def layer(params, x):
    return jax.vmap(lambda row: subtract(params["w"], row, fault))(x)

  return Model(*make_network(layer, "w"))


def _make_custom_vjp_network(forward, backward):
  """A matmul that is computed differently if it is differentiated.

  The matmuls of a backward rule are located where the function is called.
  """

  @jax.custom_vjp
  def layer(w, x):
    return x @ w

  layer.defvjp(
    lambda w, x: (forward(w, x), (w, x)),
    lambda residuals, ct: (residuals[1].T @ ct, backward(residuals[0], ct)),
  )
  call_layer = lambda params, x: layer(params["w"], x)  # planted
  return make_network(call_layer, "w")


def custom_vjp_forward(fault):
  """It computes what is not computed where nothing is differentiated."""
  forward = lambda w, x: subtract(w, x, fault)
  return Model(*_make_custom_vjp_network(forward, lambda w, ct: ct @ w.T))


def custom_vjp_backward(fault):
  shift = 300 * SHIFT if fault else 0.1 * SHIFT
  backward = lambda w, ct: ct @ (w + shift).T - ct @ shift.T
  return Model(*_make_custom_vjp_network(lambda w, x: x @ w, backward))
