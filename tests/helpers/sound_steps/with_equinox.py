"""Steps with Equinox, whose models are pytrees of arrays and functions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  CLASSES,
  FEATURES,
  HIDDEN,
  make_batch,
  mse,
  train,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adamw(1e-2))


def _make_mlp():
  return eqx.nn.MLP(
    FEATURES, CLASSES, HIDDEN, 1, jax.nn.tanh, key=jax.random.key(0)
  )


def mse_loss_fn(model, batch):
  return mse(jax.vmap(model)(batch[0]), batch[1])


def _init_optimizer(model, filter_spec=eqx.is_inexact_array):
  return TX.init(eqx.filter(model, filter_spec))


def _train(loss_fn, model, opt_state, trained, *args):
  """Update the part of a model that is trained."""
  loss, grads = ols.value_and_grad(
    ols.autocast(loss_fn), opt_state, using=eqx.filter_value_and_grad
  )(trained, *args)
  params = eqx.filter(trained, eqx.is_inexact_array)
  updates, opt_state = TX.update(grads, opt_state, params)
  return eqx.apply_updates(model, updates), opt_state, loss


def partition_and_combine():
  """Arrays under ``jax.jit``; functions of the model in the closure."""
  params, static = eqx.partition(_make_mlp(), eqx.is_inexact_array)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss_fn = lambda params: mse_loss_fn(eqx.combine(params, static), batch)
    return train(TX, loss_fn, params, opt_state)

  return train_step, (params, TX.init(params), make_batch())


def frozen_backbone():
  """Only the last layer is trained."""
  model = _make_mlp()
  frozen = jax.tree.map(lambda _: False, model)
  last = lambda model: (model.layers[-1].weight, model.layers[-1].bias)
  filter_spec = eqx.tree_at(last, frozen, (True, True))

  @eqx.filter_jit
  def train_step(model, opt_state, batch):
    trained, backbone = eqx.partition(model, filter_spec)
    loss_fn = lambda trained: mse_loss_fn(eqx.combine(trained, backbone), batch)
    return _train(loss_fn, model, opt_state, trained)

  return train_step, (model, _init_optimizer(model, filter_spec), make_batch())


class TrainState(eqx.Module):
  model: eqx.nn.MLP
  opt_state: Any
  step: jax.Array


def train_state_module():
  """Model, optimizer state and count are one module."""
  model = _make_mlp()

  @eqx.filter_jit
  def train_step(state, batch):
    model, opt_state, loss = _train(
      mse_loss_fn, state.model, state.opt_state, state.model, batch
    )
    return TrainState(model, opt_state, state.step + 1), loss

  state = TrainState(model, _init_optimizer(model), jnp.int32(0))
  return train_step, (state, make_batch())
