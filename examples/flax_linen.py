"""A Flax linen convnet on scikit-learn's digits, in float16.

    python examples/flax_linen.py --steps 300

Shows the two lines that change with `TrainState`, and the third that a model
with batch normalization needs: a forward pass that overflows must not leave
its NaN in the running statistics.
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


class StatsState(TrainState):
  """Flax's TrainState with batch statistics."""

  batch_stats: dict


class ConvNet(nn.Module):
  """Float32 params, float16 arithmetic, float32 logits."""

  @nn.compact
  def __call__(self, x, train=True):
    for features in (16, 32):
      x = nn.Conv(features, (3, 3), strides=2, dtype=jnp.float16)(x)
      x = nn.BatchNorm(use_running_average=not train, dtype=jnp.float16)(x)
      x = nn.relu(x)
    x = x.reshape(len(x), -1)
    return nn.Dense(10, dtype=jnp.float16)(x).astype(jnp.float32)


def loss_fn(params, state, images, labels):
  variables = {"params": params, "batch_stats": state.batch_stats}
  logits, new = state.apply_fn(variables, images, mutable=["batch_stats"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean(), new["batch_stats"]


@jax.jit
def train_step(state, images, labels):
  # differentiated = jax.value_and_grad(loss_fn, has_aux=True)
  differentiated = ols.value_and_grad(loss_fn, state, has_aux=True)  # line 2
  (loss, new_stats), grads = differentiated(state.params, state, images, labels)
  old_stats = state.batch_stats
  state = state.apply_gradients(grads=grads)
  stats = ols.select_if_finite(state, new_stats, old_stats)
  return state.replace(batch_stats=stats), loss


@jax.jit
def accuracy(state, images, labels):
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  logits = state.apply_fn(variables, images, train=False)
  return jnp.mean(logits.argmax(-1) == labels)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=300)
  steps = parser.parse_args().steps

  digits = load_digits()
  images, labels = digits.images[..., None] / 16, digits.target
  test_images, test_labels = images[1500:], labels[1500:]

  model = ConvNet()
  # tx = optax.adam(3e-3)
  tx = ols.with_loss_scaling(optax.adam(3e-3))  # line 1
  variables = model.init(jax.random.key(0), images[:1])
  state = StatsState.create(apply_fn=model.apply, tx=tx, **variables)

  rng = np.random.default_rng(0)
  progress = tqdm(range(steps))
  for step in progress:
    batch = rng.choice(1500, 64)
    x = images[batch]
    if step == steps // 2:
      x = x * 1e6  # a bad batch: the forward pass overflows float16
    state, loss = train_step(state, x, labels[batch])
    if step % 20 == 0:
      ols.raise_if_stuck(state)
      progress.set_postfix(loss=f"{loss:.3f}")

  scale = ols.get_loss_scale_state(state)
  print(f"test accuracy {accuracy(state, test_images, test_labels):.3f}")
  print(f"loss scale {scale.loss_scale:g}, skipped {scale.total_notfinite}")
  print(f"statistics finite: {ols.all_finite(state.batch_stats)}")


if __name__ == "__main__":
  main()
