"""A tiny problem, for tests of what goes around it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols


def init_params():
  # With this seed and that of the batches, each optimizer of Optax trains soon.
  rng = np.random.default_rng(18)
  return {
    "b": np.float32([0.1, -0.2, 0.3]),
    "v": rng.normal(size=(3, 2)).astype(np.float32),
    "w": rng.normal(size=(4, 3), scale=0.5).astype(np.float32),
  }


def make_batches(steps):
  """A list of (x, y)."""
  rng = np.random.default_rng(19)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return [(normal(5, 4), normal(5, 2)) for _ in range(steps)]


def make_overflowing_batch(batch):
  """The same, but with inputs that make the loss NaN and all gradients."""
  x, y = batch
  return np.full(x.shape, np.inf, x.dtype), y


def loss_fn(params, batch):
  x, y = batch
  hidden = jnp.tanh(x @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - y) ** 2)


def make_step(tx, loss_fn=loss_fn):
  """A jitted step with the two changed lines."""

  @jax.jit
  def step(params, opt_state, batch):
    value, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  return step
