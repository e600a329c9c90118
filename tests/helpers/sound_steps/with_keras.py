"""Steps with Keras on JAX, whose models are called without state."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.

import jax
import jax.numpy as jnp
import keras
import optax

from helpers.sound_steps import (
  CLASSES,
  FEATURES,
  HIDDEN,
  integers,
  make_batch,
  mse,
)
import optax_lossscale as ols


def _make_step(make_layers, loss_of_outputs, batch):
  keras.utils.set_random_seed(0)
  model = keras.Sequential(make_layers(keras.layers))
  tx = ols.with_loss_scaling(optax.adamw(1e-2))

  def loss_fn(params, others, batch):
    out, others = model.stateless_call(params, others, batch[0], training=True)
    return loss_of_outputs(batch[1], out), others

  @jax.jit
  def train_step(params, others, opt_state, batch):
    (loss, new_others), grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, has_aux=True
    )(params, others, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    others = ols.select_if_applied(opt_state, new_others, others)
    return optax.apply_updates(params, updates), others, opt_state, loss

  params = [v.value for v in model.trainable_variables]
  others = [v.value for v in model.non_trainable_variables]
  return train_step, (params, others, tx.init(params), batch)


def batch_norm_and_dropout():
  make_layers = lambda layers: [
    layers.Input((FEATURES,)),
    layers.Dense(HIDDEN),
    layers.BatchNormalization(),
    layers.Activation("gelu"),
    layers.Dropout(0.2),
    layers.Dense(CLASSES),
  ]
  return _make_step(make_layers, mse, make_batch())


def text_classifier():
  """Padding is masked by the layers, and the loss takes probabilities."""
  make_layers = lambda layers: [
    layers.Input((6,), dtype="int32"),
    layers.Embedding(12, FEATURES, mask_zero=True),
    layers.GlobalAveragePooling1D(),
    layers.Dense(CLASSES, activation="softmax"),
  ]
  words = integers(12, 8, 6)
  words[:, 4:] = 0
  loss_fn = keras.losses.SparseCategoricalCrossentropy()
  return _make_step(make_layers, loss_fn, (words, jnp.arange(8) % CLASSES))
