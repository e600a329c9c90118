"""Keras on JAX: one of its applications, with dropout and batch statistics."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.

import jax
import jax.numpy as jnp
import keras

from helpers.float32_models import Model, noisy_images


def mobile_net():
  keras.utils.set_random_seed(0)
  model = keras.applications.MobileNet(
    (64, 64, 3), alpha=0.25, dropout=0.1, weights=None, classes=10
  )
  return _make_classifier(model, noisy_images(16, 64))


def text_classifier():
  """A separable convolution, causal attention and a recurrence of two sides."""
  keras.utils.set_random_seed(0)
  layers = keras.layers
  tokens = layers.Input((16,), dtype="int32")
  x = layers.Embedding(96, 32)(tokens)
  x = layers.SeparableConv1D(32, 3, padding="same", activation="gelu")(x)
  y = layers.LayerNormalization()(x)
  y = layers.MultiHeadAttention(4, 8, dropout=0.1)(y, y, use_causal_mask=True)
  x = layers.BatchNormalization()(x + y)
  x = layers.Bidirectional(layers.LSTM(16))(x)
  x = layers.Dense(10, activation="softmax")(layers.Dropout(0.1)(x))
  words = jax.random.randint(jax.random.key(0), (16, 16), 0, 96)
  return _make_classifier(keras.Model(tokens, x), words)


def _make_classifier(model, inputs):
  loss = keras.losses.SparseCategoricalCrossentropy()

  def loss_fn(params, others, inputs, labels):
    predicted, others = model.stateless_call(
      params, others, inputs, training=True
    )
    return loss(labels, predicted), others

  params = [v.value for v in model.trainable_variables]
  others = [v.value for v in model.non_trainable_variables]
  return Model(loss_fn, params, (others, inputs, jnp.arange(16) % 10))
