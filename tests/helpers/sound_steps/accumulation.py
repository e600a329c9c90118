"""Steps that accumulate the gradients of several batches."""

from jax import lax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  init_mlp,
  jit_step,
  make_train_step,
  mse_loss_fn,
)
import optax_lossscale as ols

TX = ols.with_loss_scaling(optax.adam(1e-2))


def multi_steps_inside_at_the_last_micro_batch():
  inner = optax.MultiSteps(optax.adamw(1e-2), 2)
  step, args = make_train_step(ols.with_loss_scaling(inner))
  params, opt_state, batch = args
  params, opt_state, _ = step(params, opt_state, batch)
  return step, (params, opt_state, batch)


def under_cond_that_waits():
  """Gradients are added in float32; every second call updates."""

  def train_step(params, opt_state, total, count, batch):
    loss, grads = ols.value_and_grad(ols.autocast(mse_loss_fn), opt_state)(
      params, batch
    )
    total, count = optax.tree.add(total, grads), count + 1

    def apply():
      mean = optax.tree.scale(1 / 2, total)
      updates, new_state = TX.update(mean, opt_state, params)
      new_params = optax.apply_updates(params, updates)
      return new_params, new_state, optax.tree.zeros_like(total), count * 0

    wait = lambda: (params, opt_state, total, count)
    return *lax.cond(count == 2, apply, wait), loss

  zeros = optax.tree.zeros_like(init_mlp())
  return jit_step(train_step, TX, zeros, jnp.int32(0))


def under_cond_that_updates():
  step, args = under_cond_that_waits()
  *carry, _ = step(*args)
  return step, (*carry, args[-1])


def skipping_large_norms():
  """A condition of the user's own, inside of the wrapper."""
  inner = optax.transforms.conditionally_mask(
    optax.adamw(1e-2),
    lambda step, *, is_wanted, **_: is_wanted,
    forward_extra_args=True,
  )
  tx = ols.with_loss_scaling(inner)

  def train_step(params, opt_state, mean_norm, batch):
    grads = ols.grad(ols.autocast(mse_loss_fn), opt_state)(params, batch)
    norm = optax.tree.norm(grads)
    updates, opt_state = tx.update(
      grads, opt_state, params, is_wanted=norm < 10 * mean_norm
    )
    new_mean_norm = 0.9 * mean_norm + 0.1 * norm
    mean_norm = ols.select_if_finite(opt_state, new_mean_norm, mean_norm)
    return optax.apply_updates(params, updates), opt_state, mean_norm

  return jit_step(train_step, tx, jnp.float32(1))
