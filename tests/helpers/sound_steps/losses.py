"""Steps with losses of several layers.

Those of one matmul are in ``helpers.usual_losses``.
"""

import jax
import jax.numpy as jnp

from helpers.sound_steps import (
  apply_mlp,
  CLASSES,
  cross_entropy,
  FEATURES,
  HIDDEN,
  init_mlp,
  make_labeled_batch,
  make_train_step,
  mse,
  normal,
  ROWS,
)
from helpers.train_steps import jit_step, loss_fn, train
import optax_lossscale as ols


def vae():
  """The reconstruction and the divergence of a sampled code."""

  def loss_fn(params, batch):
    x, key = batch
    mean, log_variance = jnp.split(apply_mlp(params["encoder"], x), 2, -1)
    noise = jax.random.normal(key, mean.shape)
    decoded = apply_mlp(
      params["decoder"], mean + jnp.exp(log_variance / 2) * noise
    )
    divergence = jnp.exp(log_variance) + mean**2 - 1 - log_variance
    return mse(decoded, x) + 0.05 * jnp.mean(jnp.sum(divergence, -1))

  params = {
    "encoder": init_mlp((FEATURES, HIDDEN, 4)),
    "decoder": init_mlp((2, HIDDEN, FEATURES), seed=5),
  }
  batch = normal(ROWS, FEATURES, seed=1), jax.random.key(0)
  return make_train_step(loss_fn, params, batch)


def gradient_penalty():
  """The critic of a WGAN, whose loss contains a gradient."""

  def critic(params, x):
    hidden = jax.nn.softplus(x @ params["layer_0"]["w"])
    return jnp.sum(hidden @ params["layer_1"]["w"])

  def loss_fn(params, batch):
    real, fake = batch
    slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, real)
    norms = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
    distance = critic(params, fake) - critic(params, real)
    return distance / len(real) + jnp.mean((norms - 1) ** 2)

  params = {
    k: {"w": x["w"]} for k, x in init_mlp((FEATURES, HIDDEN, 1)).items()
  }
  batch = normal(ROWS, FEATURES, seed=1), 0.5 + normal(ROWS, FEATURES, seed=2)
  return make_train_step(loss_fn, params, batch)


def physics_informed():
  """The residual of a differential equation, with second derivatives."""

  def solution(params, t):
    return apply_mlp(params, t[None])[0]

  def loss_fn(params, times):
    second = jax.vmap(jax.grad(jax.grad(solution, 1), 1), (None, 0))
    values = jax.vmap(solution, (None, 0))(params, times)
    start = solution(params, jnp.float32(0)) - 1
    return mse(second(params, times), -values) + start**2

  return make_train_step(
    loss_fn, init_mlp((1, HIDDEN, 1)), jnp.linspace(0, 2, ROWS)
  )


def invalid_actions():
  """The policy gives no probability to actions that are not allowed."""

  def loss_fn(params, batch):
    x, actions, advantages, is_allowed = batch
    logits = jnp.where(is_allowed, apply_mlp(params, x), -jnp.inf)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, actions[:, None], 1)[:, 0]
    safe_log_probs = jnp.where(is_allowed, log_probs, 0)
    entropy = -jnp.sum(jax.nn.softmax(logits) * safe_log_probs, -1)
    return -jnp.mean(chosen * advantages + 0.01 * entropy)

  x, actions = make_labeled_batch()
  is_allowed = jax.nn.one_hot(actions, CLASSES) + (jnp.arange(CLASSES) < 2) > 0
  batch = x, actions, normal(ROWS, seed=3), is_allowed
  return make_train_step(loss_fn, batch=batch)


def small_gradients():
  """Without a loss scale, most of them underflow."""

  def loss_fn(params, batch):
    return 1e-5 * cross_entropy(apply_mlp(params, batch[0]), batch[1])

  return make_train_step(loss_fn, batch=make_labeled_batch())


def best_loss_that_starts_at_inf():
  """The best loss so far is inf before the first step."""

  def train_step(params, opt_state, best_loss, batch):
    loss = loss_fn(params, batch)
    params, opt_state = train(params, opt_state, batch)
    new_best_loss = jnp.minimum(loss, best_loss)
    best_loss = ols.select_if_finite(opt_state, new_best_loss, best_loss)
    return params, opt_state, best_loss, loss

  return jit_step(train_step, jnp.float32(jnp.inf))
