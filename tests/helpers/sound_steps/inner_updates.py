"""Steps in which an update serves another one, such as in meta-learning."""

import functools

import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  init_mlp,
  jit_step,
  make_batch,
  mse,
  mse_loss_fn,
  train,
)
import optax_lossscale as ols

SGD = ols.with_loss_scaling(optax.sgd(0.1))
ADAM = ols.with_loss_scaling(optax.adam(1e-2))
PARAMS, BATCH = init_mlp(), make_batch()
_cast_loss_fn = ols.autocast(mse_loss_fn)


def _train_twice(tx, params, opt_state, batch):
  for _ in range(2):
    params, opt_state, _ = train(tx, mse_loss_fn, params, opt_state, batch)
  return params, opt_state


def _move(tx, params, opt_state, batch):
  """Return the parameters after an update whose state is dropped."""
  grads = ols.grad(_cast_loss_fn, opt_state)(params, batch)
  updates, _ = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates)


def _apply(tx, grads, params, opt_state):
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state


def diloco():
  """The outer optimizer receives the difference of parameters."""
  outer = ols.with_loss_scaling(optax.sgd(0.7, momentum=0.9, nesterov=True))

  def train_step(params, inner_state, outer_state, batch):
    new_params, inner_state = _train_twice(ADAM, params, inner_state, batch)
    difference = jax.tree.map(jnp.subtract, params, new_params)
    params, outer_state = _apply(outer, difference, params, outer_state)
    return params, inner_state, outer_state

  return jit_step(train_step, ADAM, outer.init(PARAMS))


def reptile():
  """The parameters move towards those of a few steps."""

  def train_step(params, opt_state, batch):
    new_params, opt_state = _train_twice(SGD, params, opt_state, batch)
    return optax.incremental_update(new_params, params, 0.1), opt_state

  return jit_step(train_step, SGD)


def extragradient():
  return _make_extragradient_step(SGD)


def extragradient_with_moments():
  return _make_extragradient_step(ADAM)


def _make_extragradient_step(tx):
  """The gradient is that of parameters ahead."""

  def train_step(params, opt_state, batch):
    ahead = _move(tx, params, opt_state, batch)
    grads = ols.grad(_cast_loss_fn, opt_state)(ahead, batch)
    return _apply(tx, grads, params, opt_state)

  return jit_step(train_step, tx)


def darts():
  """The weights of operations are judged after a virtual step."""

  def loss_fn(weights, params, batch):
    x, y = batch
    return mse(jax.nn.sigmoid(weights) * apply_mlp(params, x), y)

  @jax.jit
  def train_step(weights, params, weights_state, opt_state, batch):
    of_params = lambda params: ols.autocast(loss_fn)(weights, params, batch)
    grads = ols.grad(of_params, opt_state)(params)
    virtual, _ = _apply(SGD, grads, params, opt_state)
    weights, weights_state, _ = train(
      ADAM, loss_fn, weights, weights_state, virtual, batch
    )
    grads = ols.grad(of_params, opt_state)(params)
    params, opt_state = _apply(SGD, grads, params, opt_state)
    return weights, params, weights_state, opt_state

  weights = jnp.zeros(BATCH[1].shape[1])
  states = ADAM.init(weights), SGD.init(PARAMS)
  return train_step, (weights, PARAMS, *states, BATCH)


def maml():
  """The loss is that after an inner update, which is differentiated."""

  def train_step(params, opt_state, inner_state, batch):
    loss_fn = lambda p: _cast_loss_fn(_move(SGD, p, inner_state, batch), batch)
    grads = ols.grad(loss_fn, opt_state)(params)
    return *_apply(ADAM, grads, params, opt_state), inner_state

  return jit_step(train_step, ADAM, SGD.init(PARAMS))


def first_order_maml():
  @jax.jit
  def train_step(params, opt_state, inner_state, batch):
    ahead = _move(SGD, params, inner_state, batch)
    grads = ols.grad(_cast_loss_fn, opt_state)(ahead, batch)
    return *_apply(ADAM, grads, params, opt_state), inner_state

  return train_step, (PARAMS, ADAM.init(PARAMS), SGD.init(PARAMS), BATCH)


def federated_averaging():
  """Each client starts from the same parameters and the same state."""

  def train_step(params, opt_state, batches):
    client = functools.partial(_train_twice, ADAM, params, opt_state)
    all_params, states = jax.vmap(client)(batches)
    mean = jax.tree.map(lambda x: jnp.mean(x, 0), all_params)
    return mean, jax.tree.map(lambda x: x[0], states)

  batches = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
  return jit_step(train_step, ADAM, batch=batches)


def variance_reduced():
  """A gradient is corrected by that of a snapshot, as in SVRG."""

  def train_step(params, opt_state, snapshot, snapshot_grads, batch):
    grad_fn = ols.grad(_cast_loss_fn, opt_state)
    grads = jax.tree.map(
      lambda new, old, mean: new - old + mean,
      grad_fn(params, batch),
      grad_fn(snapshot, batch),
      snapshot_grads,
    )
    return _apply(ADAM, grads, params, opt_state), snapshot, snapshot_grads

  snapshot = init_mlp(seed=7)
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  return jit_step(train_step, ADAM, snapshot, zeros)


def retry_in_a_branch():
  """A skipped step is repeated with the lower loss scale."""

  def train_step(params, opt_state, batch):
    first = train(ADAM, mse_loss_fn, params, opt_state, batch)
    is_applied = ols.get_loss_scale_state(first[1]).last_finite
    again = lambda: train(ADAM, mse_loss_fn, params, first[1], batch)
    return jax.lax.cond(is_applied, lambda: first, again)

  return jit_step(train_step, ADAM)
