"""Steps with models whose ops are hard for float16: masks, routing, scans."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.sound_steps import (
  apply_mlp,
  CLASSES,
  cross_entropy,
  dense,
  FEATURES,
  init_mlp,
  integers,
  make_train_step,
  mse,
  no_cast,
  normal,
)
import optax_lossscale as ols

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
  tokens[2:, 4:] = 0
  return make_train_step(loss_fn, params, tokens)


def causal_mask_of_finfo_min():
  """With the keys of padding masked, too."""

  def mask_scores(scores, inputs):
    causal = jnp.tril(jnp.ones((inputs.shape[1],) * 2, bool))
    mask = causal & (inputs != 0)[:, None]
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)

  return _make_transformer_step(mask_scores)


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
  x = normal(2, LENGTH, FEATURES, seed=5)
  return make_train_step(loss_fn, params, (x, x[:, ::-1]))


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
  return make_train_step(loss_fn, params)


def rarely_used_rows():
  """Most rows of the table have no gradient in one batch."""

  def loss_fn(params, batch):
    tokens, labels = batch
    x = jnp.mean(params["embed"][tokens], 1)
    return cross_entropy(apply_mlp(params["mlp"], x), labels)

  params = {"embed": normal(500, FEATURES), "mlp": init_mlp()}
  batch = integers(500, 8, 3), integers(CLASSES, 8, seed=1)
  return make_train_step(loss_fn, params, batch)


def elementwise_ops():
  """A model without a matmul, in float16 by hand."""

  def loss_fn(params, x):
    half_params, x = optax.tree.cast((params, x), jnp.float16)
    out = jnp.tanh(x * half_params["scale"] + half_params["shift"])
    return jnp.mean((out.astype(jnp.float32) - 1) ** 2)

  params = {"scale": np.ones(4, np.float32), "shift": np.zeros(4, np.float32)}
  return make_train_step(loss_fn, params, normal(8, 4), cast=no_cast)
