"""A Flax NNX perceptron on scikit-learn's digits, in float16.

    python examples/flax_nnx.py --steps 300

Shows the two lines that change with `nnx.Optimizer`, and how to read the scale
off the optimizer and to set it.
"""

import argparse

from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lossscale as ols


class Perceptron(nnx.Module):
  """Float32 params, float16 arithmetic, float32 logits."""

  def __init__(self, rngs):
    self.hidden = nnx.Linear(64, 128, dtype=jnp.float16, rngs=rngs)
    self.out = nnx.Linear(128, 10, dtype=jnp.float16, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x))).astype(jnp.float32)


def loss_fn(model, images, labels):
  logits = model(images)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
  # differentiated = nnx.value_and_grad(loss_fn)
  differentiated = ols.value_and_grad(  # line 2
    loss_fn, optimizer, using=nnx.value_and_grad
  )
  loss, grads = differentiated(model, images, labels)
  optimizer.update(model, grads)
  return loss


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=300)
  steps = parser.parse_args().steps

  images, labels = load_digits(return_X_y=True)
  images /= 16

  model = Perceptron(nnx.Rngs(0))
  # tx = optax.adam(1e-3)
  tx = ols.with_loss_scaling(optax.adam(1e-3))  # line 1
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  # Much too high, to see the first steps skipped and the scale come down.
  nnx.update(optimizer, ols.set_loss_scale(nnx.state(optimizer), 2.0**28))

  rng = np.random.default_rng(0)
  progress = tqdm(range(steps))
  for step in progress:
    batch = rng.choice(1500, 64)
    loss = train_step(model, optimizer, images[batch], labels[batch])
    if step % 20 == 0:
      ols.raise_if_stuck(optimizer)
      progress.set_postfix(loss=f"{loss:.3f}")

  scale = ols.get_loss_scale_state(optimizer)
  accuracy = jnp.mean(model(images[1500:]).argmax(-1) == labels[1500:])
  print(f"test accuracy {accuracy:.3f}")
  print(f"loss scale {scale.loss_scale:g}, skipped {scale.total_notfinite}")
  print(f"steps counted by nnx.Optimizer, the skipped included: {steps}")


if __name__ == "__main__":
  main()
