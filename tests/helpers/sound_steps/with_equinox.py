"""Steps with Equinox, whose models are pytrees of arrays and functions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  CLASSES,
  cross_entropy,
  FEATURES,
  HIDDEN,
  make_batch,
  make_image_batch,
  make_train_step,
  mse,
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


def _train(loss_fn, model, opt_state, *args, **kwargs):
  """Return the new model, the new state and the value of the loss function."""
  using = eqx.filter_value_and_grad
  value, grads = ols.value_and_grad(
    ols.autocast(loss_fn), opt_state, using=using, **kwargs
  )(model, *args)
  params = eqx.filter(model, eqx.is_inexact_array)
  updates, opt_state = TX.update(grads, opt_state, params)
  return eqx.apply_updates(model, updates), opt_state, value


def partition_and_combine():
  """Arrays under ``jax.jit``; functions of the model in the closure."""
  params, static = eqx.partition(_make_mlp(), eqx.is_inexact_array)
  loss_fn = lambda params, batch: mse_loss_fn(
    eqx.combine(params, static), batch
  )
  return make_train_step(loss_fn, params, make_batch())


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
    trained, opt_state, loss = _train(loss_fn, trained, opt_state)
    return eqx.combine(trained, backbone), opt_state, loss

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
      mse_loss_fn, state.model, state.opt_state, batch
    )
    return TrainState(model, opt_state, state.step + 1), loss

  state = TrainState(model, _init_optimizer(model), jnp.int32(0))
  return train_step, (state, make_batch())


class ConvNet(eqx.Module):
  conv: eqx.nn.Conv2d
  norm: eqx.nn.BatchNorm
  out: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key)
    self.conv = eqx.nn.Conv2d(1, 4, 3, key=keys[0])
    self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
    self.out = eqx.nn.Linear(4, CLASSES, key=keys[1])

  def __call__(self, image, state):
    x, state = self.norm(self.conv(image), state)
    return self.out(jnp.mean(jax.nn.relu(x), (1, 2))), state


def batch_norm():
  """The state of the model is an argument and a result."""
  model, model_state = eqx.nn.make_with_state(ConvNet)(jax.random.key(0))

  def loss_fn(model, model_state, images, labels):
    logits, new_state = jax.vmap(
      model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )(images.reshape(8, 1, 6, 6), model_state)
    return cross_entropy(logits, labels), new_state

  @eqx.filter_jit
  def train_step(model, model_state, opt_state, images, labels):
    args = model, opt_state, model_state, images, labels
    model, opt_state, (_, new_state) = _train(loss_fn, *args, has_aux=True)
    new_state = ols.select_if_applied(opt_state, new_state, model_state)
    return model, new_state, opt_state

  images, labels = make_image_batch()
  opt_state = _init_optimizer(model)
  return train_step, (model, model_state, opt_state, images, labels)
