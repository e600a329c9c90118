"""Steps with losses that mask, count, contrast or sample."""

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  apply_mlp,
  CLASSES,
  cross_entropy,
  cross_entropy_loss_fn,
  dense,
  FEATURES,
  HIDDEN,
  init_mlp,
  integers,
  make_batch,
  make_labeled_batch,
  make_train_step,
  mse,
  normal,
  ROWS,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adam(1e-2))


def token_mask():
  """A mean over the tokens that are not padding."""

  def loss_fn(params, batch):
    tokens, labels = batch
    logits = apply_mlp(params["mlp"], params["embed"][tokens])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mask = labels != 0
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

  params = {"embed": normal(12, FEATURES), "mlp": init_mlp()}
  labels = integers(CLASSES, 4, 6, seed=1).at[:, 0].set(1).at[:, 4:].set(0)
  return make_train_step(TX, loss_fn, params, (integers(12, 4, 6), labels))


def padding_rows():
  """Rows that fill the last batch are zero, and have no loss."""

  def loss_fn(params, batch):
    x, y, mask = batch
    errors = jnp.mean((apply_mlp(params, x) - y) ** 2, -1)
    return jnp.mean(errors, where=mask)

  mask = jnp.arange(ROWS) < 5
  x, y = (jnp.where(mask[:, None], a, 0) for a in make_batch())
  return make_train_step(TX, loss_fn, batch=(x, y, mask))


def smoothed_labels_and_decay():
  """A penalty of the weights is a part of the loss."""

  def loss_fn(params, batch):
    x, labels = batch
    targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
    losses = optax.softmax_cross_entropy(apply_mlp(params, x), targets)
    return jnp.mean(losses) + 1e-3 * optax.tree.norm(params, squared=True)

  return make_train_step(TX, loss_fn, batch=make_labeled_batch())


def auxiliary_loss():
  """Two heads, each with its loss, share a layer."""

  def loss_fn(params, batch):
    x, y, labels = batch
    hidden = jnp.tanh(x @ params["shared"])
    main = mse(hidden @ params["regression"], y)
    auxiliary = cross_entropy(hidden @ params["classes"], labels)
    return main + 0.1 * auxiliary

  params = {
    "shared": dense(FEATURES, HIDDEN),
    "regression": dense(HIDDEN, CLASSES, seed=1),
    "classes": dense(HIDDEN, CLASSES, seed=2),
  }
  batch = *make_batch(), integers(CLASSES, ROWS)
  return make_train_step(TX, loss_fn, params, batch)


def info_nce():
  """Two views of an example are positives, all others are negatives."""

  def loss_fn(params, views):
    first, second = (apply_mlp(params["encoder"], x) for x in views)
    first /= jnp.linalg.norm(first, axis=-1, keepdims=True)
    second /= jnp.linalg.norm(second, axis=-1, keepdims=True)
    logits = jnp.exp(params["log_temperature"]) * first @ second.T
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

  params = {"encoder": init_mlp(), "log_temperature": jnp.float32(1.0)}
  x = normal(ROWS, FEATURES, seed=1)
  views = x + normal(*x.shape, seed=2, scale=0.1), x
  return make_train_step(TX, loss_fn, params, views)


def ctc():
  """Labels are aligned with the frames, with padding in both."""

  def loss_fn(params, batch):
    frames, frame_padding, labels, label_padding = batch
    logits = apply_mlp(params, frames)
    losses = optax.ctc_loss(logits, frame_padding, labels, label_padding)
    return jnp.mean(losses)

  frames = normal(2, 8, FEATURES, seed=1)
  frame_padding = jnp.zeros((2, 8)).at[1, 6:].set(1)
  labels = jnp.array([[1, 2, 1], [3, 1, 0]])
  label_padding = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
  batch = frames, frame_padding, labels, label_padding
  return make_train_step(TX, loss_fn, batch=batch)


def segments():
  """Rows are averaged by the graph that they belong to."""

  def loss_fn(params, batch):
    x, segment_ids, y = batch
    sums = jax.ops.segment_sum(apply_mlp(params, x), segment_ids, 3)
    counts = jax.ops.segment_sum(jnp.ones(len(x)), segment_ids, 3)
    return mse(sums / jnp.maximum(counts, 1)[:, None], y)

  x, y = make_batch()
  batch = x, jnp.array([0, 0, 0, 1, 1, 1, 2, 2]), y[:3]
  return make_train_step(TX, loss_fn, batch=batch)


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
  return make_train_step(TX, loss_fn, params, batch)


def diffusion():
  """The noise is predicted from the noisy input and the time."""

  def loss_fn(params, batch):
    x, key = batch
    time_key, noise_key = jax.random.split(key)
    time = jax.random.uniform(time_key, (len(x), 1), minval=0.05)
    noise = jax.random.normal(noise_key, x.shape)
    angle = time * jnp.pi / 2
    noisy = jnp.cos(angle) * x + jnp.sin(angle) * noise
    features = jnp.concatenate([noisy, jnp.sin(angle), jnp.cos(angle)], -1)
    return mse(apply_mlp(params, features), noise)

  params = init_mlp((FEATURES + 2, HIDDEN, FEATURES))
  batch = normal(ROWS, FEATURES, seed=1), jax.random.key(0)
  return make_train_step(TX, loss_fn, params, batch)


def ppo():
  """Clipped ratios, a value loss and an entropy bonus."""

  def loss_fn(params, batch):
    x, actions, old_log_probs, advantages, returns = batch
    logits = apply_mlp(params["actor"], x)
    values = apply_mlp(params["critic"], x)[:, 0]
    all_log_probs = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(all_log_probs, actions[:, None], 1)[:, 0]
    ratio = jnp.exp(log_probs - old_log_probs)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actor_loss = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
    entropy = -jnp.sum(jnp.exp(all_log_probs) * all_log_probs, -1).mean()
    return actor_loss + 0.5 * mse(values, returns) - 0.01 * entropy

  params = {
    "actor": init_mlp(),
    "critic": init_mlp((FEATURES, HIDDEN, 1), seed=5),
  }
  x, actions = make_labeled_batch()
  log_probs = jax.nn.log_softmax(apply_mlp(params["actor"], x))
  old = jnp.take_along_axis(log_probs, actions[:, None], 1)[:, 0]
  advantages, returns = normal(ROWS, seed=3), normal(ROWS, seed=4)
  batch = x, actions, old, advantages, returns
  return make_train_step(TX, loss_fn, params, batch)


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
  return make_train_step(TX, loss_fn, params, batch)


def physics_informed():
  """The residual of a differential equation, with second derivatives."""

  def solution(params, t):
    return apply_mlp(params, t[None])[0]

  def loss_fn(params, times):
    second = jax.vmap(jax.grad(jax.grad(solution, 1), 1), (None, 0))
    values = jax.vmap(solution, (None, 0))(params, times)
    start = solution(params, jnp.float32(0)) - 1
    return mse(second(params, times), -values) + start**2

  times = jnp.linspace(0, 2, ROWS)
  return make_train_step(TX, loss_fn, init_mlp((1, HIDDEN, 1)), times)


def straight_through():
  """Codes are rounded, and the gradient passes."""

  def loss_fn(params, batch):
    code = apply_mlp(params["encoder"], batch[0])
    rounded = code + lax.stop_gradient(jnp.round(code) - code)
    return mse(rounded @ params["decoder"], batch[1])

  params = {"encoder": init_mlp(), "decoder": dense(CLASSES, CLASSES, seed=5)}
  return make_train_step(TX, loss_fn, params)


def hidden_markov_model():
  """The forward algorithm in log space; -1e9 is the log of zero."""
  stays_or_moves_on = jnp.eye(CLASSES, dtype=bool) | jnp.eye(
    CLASSES, k=1, dtype=bool
  )

  def loss_fn(params, frames):
    log_likelihood = apply_mlp(params["emission"], frames)
    transition = jax.nn.log_softmax(
      jnp.where(stays_or_moves_on, params["transition"], -1e9)
    )
    start = jnp.where(jnp.arange(CLASSES) == 0, 0, -1e9)

    def step(log_probs, likelihood):
      moved = jax.nn.logsumexp(log_probs[:, None] + transition, 0)
      return moved + likelihood, None

    log_probs, _ = lax.scan(step, start, jax.nn.log_softmax(log_likelihood))
    return -log_probs[-1] / len(frames)

  params = {"emission": init_mlp(), "transition": jnp.zeros((CLASSES,) * 2)}
  return make_train_step(TX, loss_fn, params, normal(6, FEATURES, seed=1))


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
  return make_train_step(TX, loss_fn, batch=batch)


def small_gradients():
  """Without a loss scale, most of them underflow."""
  loss_fn = lambda params, batch: 1e-5 * cross_entropy_loss_fn(params, batch)
  return make_train_step(TX, loss_fn, batch=make_labeled_batch())


def detection():
  """Boxes count only where there is an object."""

  def loss_fn(params, batch):
    x, boxes, has_object = batch
    out = apply_mlp(params, x)
    objectness = optax.sigmoid_focal_loss(out[:, 0], has_object)
    box_loss = jnp.sum(optax.huber_loss(out[:, 1:], boxes), -1) * has_object
    num_objects = jnp.maximum(jnp.sum(has_object), 1)
    return jnp.mean(objectness) + jnp.sum(box_loss) / num_objects

  has_object = jnp.arange(ROWS) % 3 == 0
  boxes = normal(ROWS, 3, seed=2)
  batch = normal(ROWS, FEATURES, seed=1), boxes, has_object
  return make_train_step(TX, loss_fn, batch=batch)


def _make_metrics_step(compute_metrics):
  @jax.jit
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      logits = apply_mlp(params, batch[0])
      return cross_entropy(logits, batch[1]), logits

    (loss, logits), grads = ols.value_and_grad(
      ols.autocast(loss_fn), opt_state, has_aux=True
    )(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    metrics = {"loss": loss} | compute_metrics(logits, batch[1])
    return optax.apply_updates(params, updates), opt_state, metrics

  params = init_mlp()
  return train_step, (params, TX.init(params), make_labeled_batch())


def nan_safe_metrics():
  """The accuracy of each class is NaN if the batch lacks the class."""

  def compute_metrics(logits, labels):
    is_right = jnp.argmax(logits, -1) == labels
    of_class = jax.nn.one_hot(labels, CLASSES + 1)
    per_class = jnp.sum(of_class * is_right[:, None], 0) / jnp.sum(of_class, 0)
    return {"accuracy": jnp.nanmean(per_class)}

  return _make_metrics_step(compute_metrics)


def infinite_metric():
  """The smallest loss of a class that the batch lacks reaches no update."""

  def compute_metrics(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    of_class = labels[:, None] == jnp.arange(CLASSES + 1)
    smallest = jnp.min(jnp.where(of_class, losses[:, None], jnp.inf), axis=0)
    return {"smallest_losses": smallest}

  return _make_metrics_step(compute_metrics)


def best_loss_that_starts_at_inf():
  """The best loss so far is inf before the first step."""

  @jax.jit
  def train_step(params, opt_state, best_loss, batch):
    loss, grads = ols.value_and_grad(
      ols.autocast(cross_entropy_loss_fn), opt_state
    )(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    new_best_loss = jnp.minimum(loss, best_loss)
    best_loss = ols.select_if_finite(opt_state, new_best_loss, best_loss)
    return optax.apply_updates(params, updates), opt_state, best_loss, loss

  params = init_mlp()
  batch = make_labeled_batch()
  return train_step, (params, TX.init(params), jnp.float32(jnp.inf), batch)


def ignored_pixels():
  """Segmentation in which the label 255 has no loss."""

  def loss_fn(params, batch):
    image, labels = batch
    x = lax.conv_general_dilated(
      image,
      params["conv"],
      (1, 1),
      "SAME",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    is_valid = labels != 255
    safe_labels = jnp.where(is_valid, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(x, safe_labels)
    return jnp.sum(losses, where=is_valid) / jnp.sum(is_valid)

  params = {"conv": normal(3, 3, 2, CLASSES, scale=0.2)}
  labels = integers(CLASSES, 2, 6, 6).at[:, 4:].set(255)
  batch = normal(2, 6, 6, 2, seed=1), labels
  return make_train_step(TX, loss_fn, params, batch)
