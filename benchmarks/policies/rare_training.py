"""A training with a rare domain, whose gradients are larger than the others.

A small network says on which side of a plane a point lies, and in the rare
domain, which a flag tells, the opposite: who never learns it is wrong there.
Its loss is a sum, that of the usual batches a mean, so that its gradients are
larger by ten binades, and overflow at the scale that suits the rest. In float16
by `autocast`, with SGD and clipping. Run by policies_training.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

STEPS, SEEDS = 30_000, 3
FEATURES, WIDTH, BATCH = 4, 32, 32
POINTS = 1024  # of which the loss of the rare domain is the sum
POLICIES = {
  "dynamic": ols.DynamicLossScale(),
  "headroom": ols.HeadroomLossScale(),
}


class Mixture(NamedTuple):
  """The number of consecutive batches of the rare domain, and how often."""

  length: int
  period: int


MIXTURES = [Mixture(2, 100), Mixture(2, 200), Mixture(1, 300)]


def train_all(mixture):
  """Accuracies and lost steps of float32 and of each policy, for each seed."""
  runs = {"float32": train(mixture, jnp.float32, ols.FixedLossScale(1.0))}
  for name, policy in POLICIES.items():
    runs[name] = train(mixture, jnp.float16, policy)
  return runs


def train(mixture, dtype, policy):
  """Train with all seeds at once, each with its own loss scale."""
  tx = ols.with_loss_scaling(optax.sgd(0.3), policy, max_norm=1.0)
  is_rare = np.arange(STEPS) % mixture.period >= mixture.period - mixture.length

  def step(carry, key_and_kind):
    params, opt_state = carry
    key, is_rare = key_and_kind
    batch = sample(key, is_rare)

    def loss_fn(params):
      mean = jnp.mean(losses(params, batch, dtype))
      return jnp.where(is_rare, POINTS, 1) * mean

    grads = ols.grad(loss_fn, opt_state)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    finite = ols.get_loss_scale_state(opt_state).last_finite
    return (params, opt_state), finite

  @jax.jit
  @jax.vmap
  def run(key):
    init_key, train_key, test_key = jax.random.split(key, 3)
    params = init(init_key)
    steps = jax.random.split(train_key, STEPS), jnp.asarray(is_rare)
    (params, _), finite = jax.lax.scan(step, (params, tx.init(params)), steps)
    test = [
      accuracy(params, sample(test_key, kind, 2_000)) for kind in (True, False)
    ]
    return finite, *test

  finite, rare, usual = map(
    np.asarray, run(jax.vmap(jax.random.key)(jnp.arange(SEEDS)))
  )
  lost = ~finite
  return {
    "accuracy_on_the_rare": rare.astype(float).round(3).tolist(),
    "on_the_usual": usual.astype(float).round(3).tolist(),
    "lost_of_the_rare": lost[:, is_rare].mean(axis=1).round(3).tolist(),
    "lost_of_all": lost.mean(axis=1).round(4).tolist(),
  }


def sample(key, is_rare, size=BATCH):
  """Return points with the flag of their domain, and their labels."""
  points = jax.random.normal(key, (size, FEATURES))
  flag = jnp.full((size, 1), jnp.where(is_rare, 2.0, -2.0))
  return jnp.hstack([points, flag]), (points.sum(axis=1) > 0) ^ is_rare


def init(key):
  first, second = jax.random.split(key)
  return {
    "first": jax.random.normal(first, (FEATURES + 1, WIDTH)) / 2,
    "second": jax.random.normal(second, (WIDTH, 1)) / 4,
  }


def losses(params, batch, dtype):
  points, labels = batch
  logits = ols.autocast(predict, dtype)(params, points)
  return optax.sigmoid_binary_cross_entropy(logits, labels)


def predict(params, points):
  hidden = jax.nn.relu(points @ params["first"])
  return (hidden @ params["second"])[:, 0]


def accuracy(params, batch):
  points, labels = batch
  return jnp.mean((predict(params, points) > 0) == labels)
