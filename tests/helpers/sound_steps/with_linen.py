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
  HIDDEN,
  make_batch,
  make_image_batch,
  mse,
  no_cast,
)
import optax_lossscale as ols


class TrainState(train_state.TrainState):
  batch_stats: Any = None
  average: Any = None


def _create_state(module, x):
  variables = jax.jit(module.init)(jax.random.key(0), x)
  tx = ols.with_loss_scaling(optax.adamw(1e-2))
  return TrainState.create(apply_fn=module.apply, tx=tx, **variables)


def _make_regression_step(module, cast=ols.autocast, *, uses_key=False):
  """The random key is folded with the count of steps."""
  x, y = make_batch()

  @jax.jit
  def train_step(state, batch, key):
    kwargs = {}
    if uses_key:
      rngs = {"dropout": jax.random.fold_in(key, state.step)}
      kwargs = {"train": True, "rngs": rngs}

    def loss_fn(params):
      out = state.apply_fn({"params": params}, batch[0], **kwargs)
      return mse(out, batch[1])

    loss, grads = ols.value_and_grad(cast(loss_fn), state)(state.params)
    return state.apply_gradients(grads=grads), loss

  args = _create_state(module, x), (x, y), jax.random.key(1)
  return train_step, args


class BatchNormNet(nn.Module):
  @nn.compact
  def __call__(self, images):
    x = nn.Conv(4, (3, 3), use_bias=False)(images)
    x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
    return nn.Dense(CLASSES)(jnp.mean(x, (1, 2)))


def batch_stats_and_average():
  """Statistics and an average of the parameters outlive a skipped step."""
  images, labels = make_image_batch()

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
    batch_stats, average = ols.select_if_applied(
      new, (batch_stats, average), (state.batch_stats, state.average)
    )
    return new.replace(batch_stats=batch_stats, average=average), loss

  state = _create_state(BatchNormNet(), images)
  state = state.replace(average=state.params)
  return train_step, (state, images, labels)


class DropoutNet(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.relu(nn.Dense(HIDDEN)(x))
    x = nn.Dropout(0.3, deterministic=not train)(x)
    return nn.Dense(CLASSES)(x)


def dropout():
  return _make_regression_step(DropoutNet(), uses_key=True)


class HalfNet(nn.Module):
  """Layers that compute in float16, with float32 parameters."""

  @nn.compact
  def __call__(self, x):
    x = nn.gelu(nn.Dense(HIDDEN, dtype=jnp.float16)(x))
    x = nn.LayerNorm(dtype=jnp.float32)(x)
    return nn.Dense(CLASSES, dtype=jnp.float16)(x).astype(jnp.float32)


def layers_with_dtype():
  """Without autocast: the layers cast."""
  return _make_regression_step(HalfNet(), cast=no_cast)
