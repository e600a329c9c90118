"""Steps in which an update serves another one, such as in meta-learning."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.train_steps import (
  apply_updates,
  BATCH,
  jit_step,
  loss_fn,
  PARAMS,
  train,
  TX,
)
import optax_lossscale as ols

ADAM = ols.with_loss_scaling(optax.adam(1e-2))


def _train_twice(params, opt_state, batch):
  for _ in range(2):
    params, opt_state = train(params, opt_state, batch, tx=ADAM)
  return params, opt_state


def _move(tx, params, opt_state, batch):
  """Return the parameters after an update whose state is dropped."""
  return train(params, opt_state, batch, tx=tx)[0]


def diloco():
  """The outer optimizer receives the difference of parameters."""
  outer = ols.with_loss_scaling(optax.sgd(0.7, momentum=0.9, nesterov=True))

  def train_step(params, inner_state, outer_state, batch):
    new_params, inner_state = _train_twice(params, inner_state, batch)
    difference = jax.tree.map(jnp.subtract, params, new_params)
    params, outer_state = apply_updates(outer, difference, params, outer_state)
    return params, inner_state, outer_state

  return jit_step(train_step, outer.init(PARAMS), tx=ADAM)


def extragradient():
  """The gradient is that of parameters ahead."""

  def train_step(params, opt_state, batch):
    ahead = _move(ADAM, params, opt_state, batch)
    grads = ols.grad(loss_fn, opt_state)(ahead, batch)
    return apply_updates(ADAM, grads, params, opt_state)

  return jit_step(train_step, tx=ADAM)


def darts():
  """The weights of operations are judged after a virtual step."""

  @ols.autocast
  def weighted_loss(weights, params, batch):
    out = jax.nn.sigmoid(weights) * jnp.tanh(batch @ params["w"])
    return jnp.mean((out - 1) ** 2)

  @jax.jit
  def train_step(weights, params, weights_state, opt_state, batch):
    of_params = lambda params: weighted_loss(weights, params, batch)
    grads = ols.grad(of_params, opt_state)(params)
    virtual, _ = apply_updates(TX, grads, params, opt_state)
    grads = ols.grad(weighted_loss, weights_state)(weights, virtual, batch)
    weights, weights_state = apply_updates(ADAM, grads, weights, weights_state)
    grads = ols.grad(of_params, opt_state)(params)
    params, opt_state = apply_updates(TX, grads, params, opt_state)
    return weights, params, weights_state, opt_state

  weights = jnp.zeros(4)
  states = ADAM.init(weights), TX.init(PARAMS)
  return train_step, (weights, PARAMS, *states, BATCH)


def maml():
  """The loss is that after an inner update, which is differentiated."""

  def train_step(params, opt_state, inner_state, batch):
    moved_loss = lambda p: loss_fn(_move(TX, p, inner_state, batch), batch)
    grads = ols.grad(moved_loss, opt_state)(params)
    return *apply_updates(ADAM, grads, params, opt_state), inner_state

  return jit_step(train_step, TX.init(PARAMS), tx=ADAM)


def federated_averaging():
  """Each client starts from the same parameters and the same state."""

  def train_step(params, opt_state, batch):
    client = functools.partial(_train_twice, params, opt_state)
    all_params, states = jax.vmap(client)(jnp.stack([batch, -batch]))
    mean = jax.tree.map(lambda x: jnp.mean(x, 0), all_params)
    return mean, jax.tree.map(lambda x: x[0], states)

  return jit_step(train_step, tx=ADAM)


def retry_in_a_branch():
  """A skipped step is repeated with the lower loss scale."""

  def train_step(params, opt_state, batch):
    first = train(params, opt_state, batch)
    is_applied = ols.get_loss_scale_state(first[1]).last_finite
    again = lambda: train(params, first[1], batch)
    return lax.cond(is_applied, lambda: first, again)

  return jit_step(train_step)
