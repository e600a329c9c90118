"""Steps with models whose ops are hard for float16: masks, routing, scans."""

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  CLASSES,
  cross_entropy,
  dense,
  FEATURES,
  HIDDEN,
  init_mlp,
  integers,
  make_batch,
  make_train_step,
  mse,
  normal,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adam(1e-2))
VOCABULARY, LENGTH = 12, 6


def _make_transformer_step(mask_scores):
  """A language model of one attention, with padding of token 0."""

  def loss_fn(params, tokens):
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs]
    query, key, value = jnp.split(x @ params["qkv"], 3, -1)
    scores = query @ jnp.swapaxes(key, 1, 2) / FEATURES**0.5
    probs = jax.nn.softmax(mask_scores(scores, inputs))
    logits = (x + probs @ value) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses, where=labels != 0)

  params = {
    "embed": normal(VOCABULARY, FEATURES),
    "qkv": dense(FEATURES, 3 * FEATURES, seed=1),
    "head": dense(FEATURES, VOCABULARY, seed=2),
  }
  tokens = 1 + integers(VOCABULARY - 1, 4, LENGTH + 1)
  tokens = tokens.at[2:, 4:].set(0)
  return make_train_step(TX, loss_fn, params, tokens)


def _causal(inputs):
  return jnp.tril(jnp.ones((inputs.shape[1],) * 2, bool))


def causal_mask_of_inf():
  return _make_transformer_step(
    lambda scores, inputs: jnp.where(_causal(inputs), scores, -jnp.inf)
  )


def causal_mask_of_finfo_min():
  """With the keys of padding masked, too."""

  def mask_scores(scores, inputs):
    mask = _causal(inputs) & (inputs != 0)[:, None]
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)

  return _make_transformer_step(mask_scores)


def added_mask():
  """A bias of -1e9 is added in float32."""
  return _make_transformer_step(
    lambda scores, inputs: scores + jnp.where(_causal(inputs), 0, -1e9)
  )


def fully_masked_rows():
  """The double where: a row without a key gives zeros instead of NaN."""

  def mask_scores(scores, inputs):
    mask = jnp.tril(jnp.ones((inputs.shape[1],) * 2, bool), -1)
    has_key = jnp.any(mask, -1, keepdims=True)
    scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.where(has_key, scores, 0)

  return _make_transformer_step(mask_scores)


def jax_attention():
  """``jax.nn.dot_product_attention``, which masks by itself."""

  def loss_fn(params, batch):
    x, y = batch
    query, key, value = (
      a.reshape(*x.shape[:2], 2, -1)
      for a in jnp.split(x @ params["qkv"], 3, -1)
    )
    x = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mse(x.reshape(y.shape) @ params["out"], y)

  params = {
    "qkv": dense(FEATURES, 3 * FEATURES),
    "out": dense(FEATURES, FEATURES, seed=1),
  }
  batch = (
    normal(2, LENGTH, FEATURES, seed=5),
    normal(2, LENGTH, FEATURES, seed=6),
  )
  return make_train_step(TX, loss_fn, params, batch)


def mixture_of_experts():
  """The router stays in float32, and balances the load of the experts."""

  @ols.keep_float32
  def route(weights, x):
    return jax.nn.softmax(x @ weights)

  def loss_fn(params, batch):
    x, y = batch
    probs = route(params["router"], x)
    gates, chosen = lax.top_k(probs, 2)
    hidden = jax.nn.gelu(jnp.einsum("bi,eij->bej", x, params["up"]))
    outputs = jnp.einsum("bej,ejk->bek", hidden, params["down"])
    picked = jnp.take_along_axis(outputs, chosen[..., None], 1)
    load = jnp.mean(jax.nn.one_hot(chosen[:, 0], 4), 0)
    balance = 4 * jnp.sum(load * jnp.mean(probs, 0))
    return mse(jnp.sum(gates[..., None] * picked, 1), y) + 0.01 * balance

  params = {
    "router": dense(FEATURES, 4),
    "up": normal(4, FEATURES, FEATURES, seed=1, scale=0.4),
    "down": normal(4, FEATURES, CLASSES, seed=2, scale=0.4),
  }
  return make_train_step(TX, loss_fn, params)


def recurrence_by_scan():
  """A gated cell, whose state stops where a sequence ends."""

  def loss_fn(params, batch):
    x, lengths, y = batch

    def cell(state, inputs):
      time, x = inputs
      joined = jnp.concatenate([x, state], -1)
      gate = jax.nn.sigmoid(joined @ params["gate"])
      candidate = jnp.tanh(joined @ params["candidate"])
      new_state = gate * state + (1 - gate) * candidate
      return jnp.where((time < lengths)[:, None], new_state, state), None

    state = jnp.zeros((len(x), FEATURES))
    inputs = jnp.arange(x.shape[1]), jnp.swapaxes(x, 0, 1)
    state, _ = lax.scan(cell, state, inputs)
    return mse(state @ params["out"], y)

  params = {
    "gate": dense(2 * FEATURES, FEATURES),
    "candidate": dense(2 * FEATURES, FEATURES, seed=1),
    "out": dense(FEATURES, CLASSES, seed=2),
  }
  x, y = normal(4, 5, FEATURES, seed=3), normal(4, CLASSES, seed=4)
  batch = x, jnp.array([5, 3, 4, 1]), y
  return make_train_step(TX, loss_fn, params, batch)


def frozen_embedding():
  """``stop_gradient`` around a table that the optimizer holds."""

  def loss_fn(params, batch):
    tokens, labels = batch
    x = lax.stop_gradient(params["embed"])[tokens]
    return cross_entropy(apply_mlp(params["mlp"], x), labels)

  params = {"embed": normal(VOCABULARY, FEATURES), "mlp": init_mlp()}
  batch = integers(VOCABULARY, 8), integers(CLASSES, 8, seed=1)
  return make_train_step(TX, loss_fn, params, batch)


def rarely_used_rows():
  """Most rows of the table have no gradient in one batch."""

  def loss_fn(params, batch):
    tokens, labels = batch
    x = jnp.mean(params["embed"][tokens], 1)
    return cross_entropy(apply_mlp(params["mlp"], x), labels)

  params = {"embed": normal(500, FEATURES), "mlp": init_mlp()}
  batch = integers(500, 8, 3), integers(CLASSES, 8, seed=1)
  return make_train_step(TX, loss_fn, params, batch)


def graph_network():
  """Messages along edges are added at their nodes."""

  def loss_fn(params, batch):
    nodes, senders, receivers, labels = batch
    for name in ("first", "second"):
      messages = jax.nn.relu(nodes[senders] @ params[name])
      received = jax.ops.segment_sum(messages, receivers, len(nodes))
      nodes = nodes + received
    return cross_entropy(nodes @ params["out"], labels)

  params = {
    "first": dense(FEATURES, FEATURES),
    "second": dense(FEATURES, FEATURES, seed=1),
    "out": dense(FEATURES, CLASSES, seed=2),
  }
  senders, receivers = integers(6, 10, seed=3), integers(6, 10, seed=4)
  nodes, labels = normal(6, FEATURES, seed=5), integers(CLASSES, 6, seed=6)
  batch = nodes, senders, receivers, labels
  return make_train_step(TX, loss_fn, params, batch)


def convolutions_and_pooling():
  def loss_fn(params, batch):
    images, labels = batch
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
      images, params["conv"], (1, 1), "SAME", dimension_numbers=dims
    )
    window = (1, 2, 2, 1)
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    x = jnp.mean(jax.nn.relu(x), (1, 2))
    return cross_entropy(x @ params["out"], labels)

  params = {
    "conv": normal(3, 3, 1, HIDDEN, scale=0.3),
    "out": dense(HIDDEN, CLASSES, seed=1),
  }
  batch = normal(4, 6, 6, 1, seed=2), integers(CLASSES, 4)
  return make_train_step(TX, loss_fn, params, batch)


def dequantized_images():
  """Images of uint8 are divided in float32."""

  def loss_fn(params, batch):
    images, labels = batch
    x = images.astype(jnp.float32) / 255
    return cross_entropy(apply_mlp(params, x), labels)

  batch = integers(256, 8, FEATURES).astype(jnp.uint8), integers(CLASSES, 8)
  return make_train_step(TX, loss_fn, batch=batch)


def elementwise_ops():
  """A model without a matmul, in float16 by hand."""

  def loss_fn(params, batch):
    half_params, (x, y) = optax.tree.cast((params, batch), jnp.float16)
    out = jnp.tanh(x * half_params["scale"] + half_params["shift"])
    return mse(out.astype(jnp.float32), y.astype(jnp.float32))

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = {"scale": jnp.ones(CLASSES), "shift": jnp.zeros(CLASSES)}
  x, y = make_batch()
  return train_step, (params, TX.init(params), (x[:, :CLASSES], y))
