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
  integers,
  make_batch,
  mse,
  normal,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adamw(1e-2))


def _make_mlp():
  return eqx.nn.MLP(
    FEATURES, CLASSES, HIDDEN, 1, jax.nn.tanh, key=jax.random.key(0)
  )


def filter_jit():
  model = _make_mlp()

  @eqx.filter_jit
  def train_step(model, opt_state, batch):
    loss_fn = lambda model: mse(jax.vmap(model)(batch[0]), batch[1])
    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, using=eqx.filter_value_and_grad
    )(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
  return train_step, (model, opt_state, make_batch())


def partition_and_combine():
  """Arrays under ``jax.jit``; functions of the model in the closure."""
  params, static = eqx.partition(_make_mlp(), eqx.is_inexact_array)

  @jax.jit
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      model = eqx.combine(params, static)
      return mse(jax.vmap(model)(batch[0]), batch[1])

    loss, grads = ols.value_and_grad(ols.autocast(loss_fn), opt_state)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss

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

    def loss_fn(trained):
      model = eqx.combine(trained, backbone)
      return mse(jax.vmap(model)(batch[0]), batch[1])

    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, using=eqx.filter_value_and_grad
    )(trained)
    updates, opt_state = TX.update(grads, opt_state, trained)
    return eqx.apply_updates(model, updates), opt_state, loss

  opt_state = TX.init(eqx.filter(model, filter_spec))
  return train_step, (model, opt_state, make_batch())


class TrainState(eqx.Module):
  model: eqx.nn.MLP
  opt_state: Any
  step: jax.Array


def train_state_module():
  """Model, optimizer state and count are one module."""
  model = _make_mlp()

  @eqx.filter_jit
  def train_step(state, batch):
    loss_fn = lambda model: mse(jax.vmap(model)(batch[0]), batch[1])
    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), state.opt_state, using=eqx.filter_value_and_grad
    )(state.model)
    params = eqx.filter(state.model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, state.opt_state, params)
    model = eqx.apply_updates(state.model, updates)
    return TrainState(model, opt_state, state.step + 1), loss

  opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
  state = TrainState(model, opt_state, jnp.int32(0))
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

  @eqx.filter_jit
  def train_step(model, model_state, opt_state, images, labels):
    def loss_fn(model):
      logits, new_state = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
      )(images, model_state)
      return cross_entropy(logits, labels), new_state

    (loss, new_state), grads = ols.value_and_grad(
      ols.autocast(loss_fn),
      opt_state,
      using=eqx.filter_value_and_grad,
      has_aux=True,
    )(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    new_state = ols.select_if_finite(opt_state, new_state, model_state)
    return eqx.apply_updates(model, updates), new_state, opt_state, loss

  opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
  images, labels = normal(8, 1, 6, 6, seed=1), integers(CLASSES, 8)
  return train_step, (model, model_state, opt_state, images, labels)


class DropoutNet(eqx.Module):
  up: eqx.nn.Linear
  down: eqx.nn.Linear
  dropout: eqx.nn.Dropout

  def __init__(self, key):
    keys = jax.random.split(key)
    self.up = eqx.nn.Linear(FEATURES, HIDDEN, key=keys[0])
    self.down = eqx.nn.Linear(HIDDEN, CLASSES, key=keys[1])
    self.dropout = eqx.nn.Dropout(0.3)

  def __call__(self, x, key):
    x = self.dropout(jax.nn.gelu(self.up(x)), key=key)
    return self.down(x)


def dropout():
  """A key for each example, and a new key for the next step."""
  model = DropoutNet(jax.random.key(0))

  @eqx.filter_jit
  def train_step(model, opt_state, key, batch):
    key, step_key = jax.random.split(key)

    def loss_fn(model):
      keys = jax.random.split(step_key, len(batch[0]))
      return mse(jax.vmap(model)(batch[0], keys), batch[1])

    loss, grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, using=eqx.filter_value_and_grad
    )(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, key, loss

  opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
  return train_step, (model, opt_state, jax.random.key(1), make_batch())
