"""Steps that accumulate the gradients of several batches."""

import jax
from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  cross_entropy_loss_fn,
  init_mlp,
  make_batch,
  make_labeled_batch,
  make_train_step,
  mse_loss_fn,
)
import optax_lossscale as ols


def multi_steps_inside():
  """The first micro-batch of two, after which the parameters stay."""
  inner = optax.MultiSteps(optax.adamw(1e-2), 2)
  return make_train_step(ols.with_loss_scaling(inner))


def multi_steps_inside_at_the_last_micro_batch():
  step, (params, opt_state, batch) = multi_steps_inside()
  params, opt_state, _ = step(params, opt_state, batch)
  return step, (params, opt_state, batch)


def _make_cond_step():
  """Gradients are added in float32; every second call updates."""
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, total, count, batch):
    loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
    total, count = optax.tree.add(total, grads), count + 1

    def apply():
      mean = optax.tree.scale(1 / 2, total)
      updates, new_state = tx.update(mean, opt_state, params)
      new_params = optax.apply_updates(params, updates)
      return new_params, new_state, optax.tree.zeros_like(total), count * 0

    def wait():
      return params, opt_state, total, count

    return *lax.cond(count == 2, apply, wait), loss

  params = init_mlp()
  zeros = optax.tree.zeros_like(params)
  args = params, tx.init(params), zeros, jnp.int32(0), make_batch()
  return train_step, args


def under_cond_that_waits():
  return _make_cond_step()


def under_cond_that_updates():
  step, args = _make_cond_step()
  *carry, _ = step(*args)
  return step, (*carry, args[-1])


def scan_over_micro_batches():
  """The mean of the gradients of four micro-batches, in one step."""
  tx = ols.with_loss_scaling(optax.adam(1e-2), max_norm=1.0)
  loss_fn = ols.autocast(mse_loss_fn)

  @jax.jit
  def train_step(params, opt_state, batch):
    def add_grads(carry, micro_batch):
      loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, micro_batch)
      return optax.tree.add(carry, (grads, loss)), None

    micro_batches = jax.tree.map(
      lambda x: x.reshape(4, -1, *x.shape[1:]), batch
    )
    zeros = optax.tree.zeros_like(params), 0.0
    total, _ = lax.scan(add_grads, zeros, micro_batches)
    grads, loss = optax.tree.scale(1 / 4, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), make_batch(16))


def weighted_by_valid_rows():
  """A sum over micro-batches with padding, divided by all valid rows."""
  tx = ols.with_loss_scaling(optax.adam(1e-2), "headroom")

  def loss_sum_fn(params, batch):
    x, labels, mask = batch
    row_loss = jax.vmap(cross_entropy_loss_fn, (None, 0))
    return jnp.sum(row_loss(params, (x, labels)) * mask)

  @jax.jit
  def train_step(params, opt_state, micro_batches):
    def add_grads(carry, micro_batch):
      loss, grads = ols.value_and_grad(ols.autocast(loss_sum_fn), opt_state)(
        params, micro_batch
      )
      return optax.tree.add(carry, (grads, loss)), None

    zeros = optax.tree.zeros_like(params), 0.0
    total, _ = lax.scan(add_grads, zeros, micro_batches)
    grads, loss = optax.tree.scale(1 / jnp.sum(micro_batches[2]), total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_mlp()
  x, labels = make_labeled_batch(12)
  mask = jnp.arange(12) < 9
  batch = x.reshape(3, 4, -1), labels.reshape(3, 4), mask.reshape(3, 4)
  return train_step, (params, tx.init(params), batch)


def skipping_large_norms():
  """A condition of the user's own, inside of the wrapper."""
  inner = optax.transforms.conditionally_mask(
    optax.adamw(1e-2),
    lambda step, *, is_wanted, **_: is_wanted,
    forward_extra_args=True,
  )
  tx = ols.with_loss_scaling(inner)

  @jax.jit
  def train_step(params, opt_state, mean_norm, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    norm = optax.tree.norm(grads)
    updates, opt_state = tx.update(
      grads, opt_state, params, is_wanted=norm < 10 * mean_norm
    )
    new_mean_norm = 0.9 * mean_norm + 0.1 * norm
    mean_norm = ols.select_if_finite(opt_state, new_mean_norm, mean_norm)
    return optax.apply_updates(params, updates), opt_state, mean_norm, loss

  params = init_mlp()
  return train_step, (params, tx.init(params), jnp.float32(1), make_batch())
