"""Five small tasks.

A model computes in the dtype of its parameters, but norms, probabilities and
losses in float32.
"""

from collections.abc import Callable
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits, make_swiss_roll

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import rl_float16 as grpo
from shared import models
import transformer

WIDTH = grpo.WIDTH
LETTERS = 32  # that the GPT sees at once
ANSWERS = 8  # to each of 8 prompts
NOISE_LEVELS = 40


class Task(NamedTuple):
  """A model and its data, which all variants train.

  ``sample_batch`` takes parameters, a key and a function that casts a sampler.
  ``loss_fn`` takes parameters and a batch, and returns the loss and metrics.
  """

  steps: int
  learning_rate: float
  init_params: Callable[..., Any]
  sample_batch: Callable[..., Any]
  loss_fn: Callable[..., tuple[jax.Array, dict]]
  evaluate: Callable[..., jax.Array]


def make_classifier(steps, rate, init_params, model) -> Task:
  """Classify the digits of scikit-learn; every third one is for testing."""
  images, labels = map(jnp.asarray, load_digits(return_X_y=True))
  images = images.astype(jnp.float32) / 16
  is_test = np.arange(len(labels)) % 3 == 0
  train_indices = jnp.asarray(np.flatnonzero(~is_test))

  def sample_batch(params, key, cast):
    i = jax.random.choice(key, train_indices, (64,))
    return images[i], labels[i]

  def loss_fn(params, batch):
    return models.cross_entropy(model(params, batch[0]), batch[1]), {}

  def evaluate(params):
    guesses = model(params, images[is_test]).argmax(-1)
    return 100 * jnp.mean(guesses == labels[is_test])

  return Task(steps, rate, init_params, sample_batch, loss_fn, evaluate)


def make_digits() -> Task:
  """A perceptron with two hidden layers."""
  return make_classifier(600, 3e-3, init_mlp([64, 64, 64, 10]), mlp)


def make_vit() -> Task:
  """A transformer on 16 patches of 2 x 2 pixels."""

  def init_params(key):
    patch, position, layers, head = jax.random.split(key, 4)
    return {
      "patch": init_matrix(patch, 4, WIDTH),
      "position": init_matrix(position, 16, WIDTH),
      "layers": init_layers(layers),
      "head": init_matrix(head, WIDTH, 10),
    }

  def model(params, images):
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    x = patches.astype(params["patch"].dtype) @ params["patch"]
    x = transform(params["layers"], x + params["position"], causal=False)
    return x.mean(1) @ params["head"]

  return make_classifier(300, 3e-3, init_params, model)


def make_gpt() -> Task:
  """Predict the letters of Python's standard library."""
  train_text, test_text = transformer.load_text()
  train_text = jnp.asarray(train_text[:1_000_000])
  test_windows = test_text[: 256 * (LETTERS + 1)].reshape(256, -1)

  def init_params(key):
    embedding, position, layers = jax.random.split(key, 3)
    return {
      "embedding": init_matrix(embedding, WIDTH, len(transformer.LETTERS)).T,
      "position": init_matrix(position, WIDTH, LETTERS).T,
      "layers": init_layers(layers),
    }

  def sample_batch(params, key, cast):
    starts = jax.random.randint(key, (16, 1), 0, len(train_text) - LETTERS)
    return train_text[starts + jnp.arange(LETTERS + 1)]

  def loss_fn(params, text):
    x = params["embedding"][text[:, :-1]] + params["position"]
    x = transform(params["layers"], x, causal=True)
    return models.cross_entropy(x @ params["embedding"].T, text[:, 1:]), {}

  evaluate = lambda params: loss_fn(params, test_windows)[0]
  return Task(400, 5e-3, init_params, sample_batch, loss_fn, evaluate)


def make_grpo() -> Task:
  """Learn to count from rewards, by the model of examples/rl_float16.py."""

  def sample_batch(params, key, cast):
    prompt_key, key = jax.random.split(key)
    prompts = jnp.repeat(grpo.sample_prompts(prompt_key)[:8], ANSWERS, axis=0)
    text, logps = cast(grpo.sample)(params, prompts, key)
    rewards = grpo.reward(text).reshape(-1, ANSWERS)
    advantages = jax.nn.standardize(rewards, axis=1, epsilon=1e-4)
    return text, logps, advantages.reshape(-1, 1)

  def loss_fn(params, batch):
    loss, new_logps = grpo.loss_fn(params, *batch, params["head"].dtype)
    # Between the log-probabilities of the sampler and the trainer.
    return loss, {"squared_difference": jnp.mean((new_logps - batch[1]) ** 2)}

  def evaluate(params):
    prompts = jnp.tile(grpo.sample_prompts(jax.random.key(0)), (16, 1))
    text, _ = grpo.sample(params, prompts, jax.random.key(1))
    return 100 * grpo.reward(text).mean()

  return Task(200, 5e-3, grpo.init_params, sample_batch, loss_fn, evaluate)


def make_diffusion() -> Task:
  """Draw points of a spiral, by predicting the noise in noisy points."""
  points = make_swiss_roll(4096, noise=0.3, random_state=0)[0][:, ::2] / 8
  train_set, test_set = jnp.split(jnp.asarray(points, jnp.float32), [3584])
  angle = jnp.linspace(0.02, 1.55, NOISE_LEVELS)
  signal_level, noise_level = jnp.cos(angle), jnp.sin(angle)

  def predict_noise(params, x, level):
    phases = level * jnp.pi / NOISE_LEVELS * 2.0 ** jnp.arange(4)
    x = jnp.concatenate([2 * x, jnp.broadcast_to(phases, (len(x), 4))], axis=1)
    features = jnp.concatenate([x, jnp.sin(x), jnp.cos(x)], axis=1)
    return mlp(params, features).astype(jnp.float32)

  def sample_batch(params, key, cast):
    keys = jax.random.split(key, 3)
    clean = jax.random.choice(keys[0], train_set, (256,))
    level = jax.random.randint(keys[1], (256, 1), 0, NOISE_LEVELS)
    return clean, level, jax.random.normal(keys[2], clean.shape)

  def loss_fn(params, batch):
    clean, level, noise = batch
    noisy = signal_level[level] * clean + noise_level[level] * noise
    return jnp.mean((predict_noise(params, noisy, level) - noise) ** 2), {}

  def denoise(params, x, level):  # a step of DDIM
    noise = predict_noise(params, x, level)
    clean = (x - noise_level[level] * noise) / signal_level[level]
    lower = jnp.maximum(level - 1, 0)
    return signal_level[lower] * clean + noise_level[lower] * noise

  def evaluate(params):
    drawn, _ = jax.lax.scan(
      lambda x, level: (denoise(params, x, level), None),
      jax.random.normal(jax.random.key(0), test_set.shape),
      jnp.arange(NOISE_LEVELS)[::-1],
    )
    return 100 * measure_energy_distance(drawn, test_set)

  init_params = init_mlp([18, 64, 64, 2])
  return Task(1000, 3e-3, init_params, sample_batch, loss_fn, evaluate)


TASKS = {
  "digits: test accuracy (%)": make_digits,
  "diffusion: energy distance (x 100)": make_diffusion,
  "ViT: test accuracy (%)": make_vit,
  "GPT: test loss (nats a letter)": make_gpt,
  "GRPO: reward (% of digits)": make_grpo,
}


def measure_energy_distance(x, y):
  """Return the squared energy distance of two sets of points; 0 if alike."""
  distance = lambda a, b: jnp.linalg.norm(a[:, None] - b, axis=-1).mean()
  return 2 * distance(x, y) - distance(x, x) - distance(y, y)


def init_matrix(key, rows, columns):
  return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)


def init_layers(key):
  """Two of the layers of examples/rl_float16.py."""
  return jax.tree.map(lambda w: w[:2], grpo.init_params(key)["layers"])


def transform(layers, x, causal):
  """Apply a transformer to x of shape (batch, length, WIDTH)."""

  def layer(x, weights):
    qkv = grpo.split_heads(weights, x)
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=causal)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + grpo.feed_forward(weights, x), None

  return grpo.normalize(jax.lax.scan(layer, x, layers)[0])


def init_mlp(sizes):
  def init_params(key):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(init_matrix(key, m, n), jnp.zeros(n)) for key, m, n in shapes]

  return init_params


def mlp(params, x):
  x = x.astype(params[0][0].dtype)
  for weight, bias in params[:-1]:
    x = jax.nn.gelu(x @ weight + bias)
  return x @ params[-1][0] + params[-1][1]
