"""Two trainings in which most batches have gradients of exactly zero.

*hinge* tells ones from eights with a linear model: an image that keeps its
margin has a loss of zero. *masked* is a recurrent network that reads Python and
says what follows a backslash: most batches have none. Run by
policies_training.py.
"""

from collections.abc import Callable
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import transformer  # noqa: E402

SEEDS = 3
POLICIES = {
  "no scaling": ols.FixedLossScale(1.0),
  "dynamic": ols.DynamicLossScale(),
  "dynamic, every 200": ols.DynamicLossScale(growth_interval=200),
  "headroom": ols.HeadroomLossScale(),
}

WIDTH = 32  # of the recurrent network
CONTEXT = 16  # letters


class Task(NamedTuple):
  """A model to train, and its data."""

  init: Callable  # from a key: float32 parameters
  sample: Callable  # from a key: a batch
  loss_fn: Callable  # from parameters, a batch and a dtype: a float32 loss
  held_out: Any  # the batch to test with
  learning_rate: float  # of the first step; it falls to zero
  steps: int


class Run(NamedTuple):
  """The results of a training run, by seed."""

  informative: np.ndarray  # of each step: is the float32 gradient not zero?
  finite: np.ndarray  # of each step
  scales: np.ndarray  # of each step
  test_losses: np.ndarray


def train_all(task):
  """Trains once in float32, and in float16 under each policy."""
  runs = {"float32": train(task, jnp.float32, ols.FixedLossScale(1.0))}
  for name, policy in POLICIES.items():
    runs[name] = train(task, jnp.float16, policy)
  return runs


def train(task, dtype, policy):
  """Train with all seeds at once, each with its own loss scale."""
  schedule = optax.cosine_decay_schedule(task.learning_rate, task.steps)
  tx = ols.with_loss_scaling(optax.sgd(schedule), policy)

  def step(carry, key):
    params, opt_state = carry
    scale = ols.get_loss_scale_state(opt_state).loss_scale
    batch = task.sample(key)
    # In both tasks the gradient is zero where the loss is.
    informative = task.loss_fn(params, batch, jnp.float32) > 0
    grads = ols.grad(task.loss_fn, opt_state)(params, batch, dtype)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    finite = ols.get_loss_scale_state(opt_state).last_finite
    return (params, opt_state), (informative, finite, scale)

  @jax.jit
  @jax.vmap
  def run(key):
    init_key, train_key = jax.random.split(key)
    params = task.init(init_key)
    keys = jax.random.split(train_key, task.steps)
    (params, _), history = jax.lax.scan(step, (params, tx.init(params)), keys)
    return *history, task.loss_fn(params, task.held_out, jnp.float32)

  keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
  return Run(*map(np.asarray, run(keys)))


def summarize(runs):
  """One row for each run: a number for each seed."""
  return {
    name: {
      "informative_steps": run.informative.sum(axis=1).tolist(),
      "of_these_lost": (run.informative & ~run.finite).sum(axis=1).tolist(),
      "test_loss": run.test_losses.astype(float).round(5).tolist(),
      "log2_last_scale": np.log2(run.scales[:, -1]).tolist(),
    }
    for name, run in runs.items()
  }


def hinge():
  """Ones against eights, two images a step."""
  digits = load_digits()
  images = np.float32(digits.data / 16)
  signs = np.select([digits.target == 1, digits.target == 8], [1.0, -1.0])
  order = np.random.default_rng(0).permutation(np.flatnonzero(signs))
  examples = jnp.asarray(images[order]), jnp.asarray(signs[order], jnp.float32)
  train_set = [x[:280] for x in examples]
  count = len(train_set[0])

  def sample(key):
    chosen = jax.random.randint(key, (2,), 0, count)
    return [x[chosen] for x in train_set]

  def loss_fn(params, batch, dtype):
    images, signs = batch
    weights, bias, images = jax.tree.map(
      lambda x: x.astype(dtype), (*params, images)
    )
    margins = signs * (images @ weights + bias).astype(jnp.float32)
    return jnp.mean(jax.nn.relu(1 - margins))

  return Task(
    init=lambda key: (jnp.zeros(64), jnp.zeros(())),
    sample=sample,
    loss_fn=loss_fn,
    held_out=[x[280:] for x in examples],
    learning_rate=0.1,
    steps=6000,
  )


def masked():
  """The letter after a backslash; four stretches of 16 letters a step."""
  train_text, test_text = map(jnp.asarray, transformer.load_text())
  mark = transformer.LETTERS.index("\\")

  def cut_stretches(text, starts):
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)]

  def sample(key):
    starts = jax.random.randint(key, (4,), 0, train_text.size - CONTEXT)
    return cut_stretches(train_text, starts)

  def loss_fn(params, letters, dtype):
    letters, following = letters[:, :-1], letters[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(
      predict(params, letters, dtype), following
    )
    has_target = letters == mark
    # At least 1, since the mean over no target would be NaN.
    return jnp.sum(losses * has_target) / jnp.maximum(jnp.sum(has_target), 1)

  ends = np.flatnonzero(np.asarray(test_text) == mark)
  ends = np.random.default_rng(0).permutation(ends[ends >= CONTEXT])[:500]
  return Task(
    init=init_network,
    sample=sample,
    loss_fn=loss_fn,
    held_out=cut_stretches(test_text, ends - CONTEXT + 1),
    learning_rate=0.3,
    steps=4000,
  )


def init_network(key):
  keys = iter(jax.random.split(key, 4))
  letters = len(transformer.LETTERS)

  def normal(*shape):
    return jax.random.normal(next(keys), shape) / np.sqrt(WIDTH)

  return {
    "embedding": normal(letters, WIDTH),
    "input": normal(WIDTH, 3 * WIDTH),
    "recurrent": normal(WIDTH, 3 * WIDTH),
    "output": normal(WIDTH, letters),
    "bias": jnp.zeros(3 * WIDTH),
  }


def predict(params, letters, dtype):
  """Logits of each next letter, float32, by gated recurrent units."""
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  inputs = params["embedding"][letters] @ params["input"] + params["bias"]

  def unit(state, x):
    gate_x, reset_x, new_x = jnp.split(x, 3, axis=-1)
    recurrent = jnp.split(state @ params["recurrent"], 3, axis=-1)
    gate = jax.nn.sigmoid(gate_x + recurrent[0])
    reset = jax.nn.sigmoid(reset_x + recurrent[1])
    new = jnp.tanh(new_x + reset * recurrent[2])
    state = gate * state + (1 - gate) * new
    return state, state

  start = jnp.zeros((letters.shape[0], WIDTH), dtype)
  _, states = jax.lax.scan(unit, start, inputs.swapaxes(0, 1))
  return (states.swapaxes(0, 1) @ params["output"]).astype(jnp.float32)


TASKS = {"hinge": hinge, "masked": masked}
