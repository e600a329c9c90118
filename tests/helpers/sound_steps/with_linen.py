"""Steps with Flax linen and its ``TrainState``."""

from typing import Any

from flax import linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from helpers.sound_steps import (
  CLASSES,
  cross_entropy,
  integers,
  normal,
)
import optax_lossscale as ols


class TrainState(train_state.TrainState):
  batch_stats: Any = None
  average: Any = None


class BatchNormNet(nn.Module):
  @nn.compact
  def __call__(self, images):
    x = nn.Conv(4, (3, 3), use_bias=False)(images)
    x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
    return nn.Dense(CLASSES)(jnp.mean(x, (1, 2)))


def batch_stats_and_average():
  """Statistics and an average of the parameters outlive a skipped step."""
  images, labels = normal(8, 6, 6, 1, seed=1), integers(CLASSES, 8)

  @jax.jit
  def train_step(state, images, labels):
    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      logits, new = state.apply_fn(variables, images, mutable="batch_stats")
      return cross_entropy(logits, labels), new["batch_stats"]

    (loss, batch_stats), grads = ols.value_and_grad(
      ols.autocast(loss_fn), state, has_aux=True
    )(state.params)
    new = state.apply_gradients(grads=grads)
    average = optax.incremental_update(new.params, state.average, 0.01)
    batch_stats, average = ols.select_if_finite(
      new, (batch_stats, average), (state.batch_stats, state.average)
    )
    return new.replace(batch_stats=batch_stats, average=average), loss

  variables = jax.jit(BatchNormNet().init)(jax.random.key(0), images)
  state = TrainState.create(
    apply_fn=BatchNormNet().apply,
    tx=ols.with_loss_scaling(optax.adamw(1e-2)),
    average=variables["params"],
    **variables,
  )
  return train_step, (state, images, labels)
