"""A tiny problem, and the loops over it, for tests of what goes around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols


@jax.jit
def init_params():
  keys = jax.random.split(jax.random.key(0), 3)
  return {
    "b": jnp.array([0.1, -0.2, 0.3]),
    "v": jax.random.normal(keys[0], (3, 2)),
    "w": 0.5 * jax.random.normal(keys[1], (4, 3)),
  }


@functools.partial(jax.jit, static_argnums=0)
def make_batches(steps):
  """A list of (x, y)."""
  keys = jax.random.split(jax.random.key(1), steps)
  keys = [jax.random.split(key) for key in keys]
  return [
    (jax.random.normal(key_x, (5, 4)), jax.random.normal(key_y, (5, 2)))
    for key_x, key_y in keys
  ]


def make_overflowing_batch(batch):
  """The same, but with inputs that make the loss NaN and all gradients."""
  x, y = batch
  return np.full(x.shape, np.inf, x.dtype), y


def loss_fn(params, batch):
  x, y = batch
  hidden = jnp.tanh(x @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - y) ** 2)


def half_loss_fn(params, batch):
  """The same in float16, with a float32 loss."""
  (x, y), params = optax.tree.cast((batch, params), jnp.float16)
  hidden = jnp.tanh(x @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - y).astype(jnp.float32) ** 2)


def make_step(tx, loss_fn=loss_fn, *, extra=None):
  """A jitted step with the two changed lines.

  ``extra`` makes the extra arguments of ``update``: from the value, the
  gradients and the loss as a function of params.
  """

  @jax.jit
  def step(params, opt_state, batch):
    fun = lambda params: loss_fn(params, batch)
    value, grads = ols.value_and_grad(fun, opt_state)(params)
    extra_args = {} if extra is None else extra(value, grads, fun)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state, value

  return step


def train(step, params, opt_state, batches):
  for batch in batches:
    params, opt_state, _ = step(params, opt_state, batch)
  return params, opt_state
