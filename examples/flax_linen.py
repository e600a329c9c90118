"""A Flax linen convnet on scikit-learn's digits, in float16.

    python examples/flax_linen.py --steps 300

Shows the two lines that change with `TrainState`, for a float32 model with
batch normalization and dropout. It also restores the running statistics on
skipped steps, so that the NaN of a forward pass that overflows gets neither
into them nor into the log.
"""

import argparse

from flax import linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lossscale as ols


class State(TrainState):
  """Flax's TrainState with batch statistics, and a key for dropout."""

  batch_stats: dict
  key: jax.Array


class ConvNet(nn.Module):
  """Float32, and it stays so."""

  @nn.compact
  def __call__(self, x, train):
    for features in (16, 32):
      x = nn.Conv(features, (3, 3), strides=2)(x)
      x = nn.BatchNorm(use_running_average=not train)(x)
      x = nn.relu(x)
    x = nn.Dropout(0.1, deterministic=not train)(x.reshape(len(x), -1))
    return nn.Dense(10)(x)


def loss_fn(params, state, images, labels):
  variables = {"params": params, "batch_stats": state.batch_stats}
  key = jax.random.fold_in(state.key, state.step)  # other numbers in each step
  logits, new = state.apply_fn(
    variables, images, True, mutable="batch_stats", rngs={"dropout": key}
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean(), new["batch_stats"]


@jax.jit
def train_step(state, images, labels):
  # differentiated = jax.value_and_grad(loss_fn, has_aux=True)
  value_and_grad_fn = ols.value_and_grad(  # line 2
    ols.autocast(loss_fn), state, has_aux=True
  )
  (loss, stats), grads = value_and_grad_fn(state.params, state, images, labels)
  new_state = state.apply_gradients(grads=grads)
  # The old statistics on a skipped step, and no number instead of a wrong one.
  stats, logged = ols.select_if_applied(
    new_state, (stats, loss), (state.batch_stats, jnp.full_like(loss, jnp.nan))
  )
  return new_state.replace(batch_stats=stats), logged


@jax.jit
def accuracy(state, images, labels):
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  logits = state.apply_fn(variables, images, False)
  return jnp.mean(logits.argmax(-1) == labels)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=300)
  steps = parser.parse_args().steps

  images, labels = load_digits(return_X_y=True)
  images = np.float32(images.reshape(-1, 8, 8, 1) / 16)

  model = ConvNet()
  # tx = optax.adam(3e-3)
  tx = ols.with_loss_scaling(optax.adam(3e-3))  # line 1
  variables = model.init(jax.random.key(0), images[:1], False)
  state = State.create(
    apply_fn=model.apply, tx=tx, key=jax.random.key(1), **variables
  )

  rng = np.random.default_rng(0)
  losses = []
  progress = tqdm(range(steps))
  for step in progress:
    batch = rng.choice(1500, 64)
    x = images[batch]
    if step == steps // 2:
      x = x * 1e6  # a bad batch: the forward pass overflows float16
    state, loss = train_step(state, x, labels[batch])
    losses.append(loss)  # not read yet, which would wait for the step
    if step % 20 == 0:
      ols.raise_if_stuck(state)
      progress.set_postfix(loss=f"{np.nanmean(losses[-20:]):.3f}")

  scale = ols.get_loss_scale_state(state)
  print(f"mean loss of the last 50 steps {np.nanmean(losses[-50:]):.3f}")
  print(f"test accuracy {accuracy(state, images[1500:], labels[1500:]):.3f}")
  print(f"loss scale {scale.loss_scale:g}, skipped {scale.total_notfinite}")
  print(f"statistics finite: {ols.all_finite(state.batch_stats)}")


if __name__ == "__main__":
  main()
