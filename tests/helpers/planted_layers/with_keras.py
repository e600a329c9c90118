"""Faults of Keras' layers, on JAX."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.

import jax.numpy as jnp
import keras

from helpers.planted_layers import batch, Model, WIDTH


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
  return Model(loss_fn, (params, others, *batch()), scope="bad")
