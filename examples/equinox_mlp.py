"""An Equinox perceptron on scikit-learn's digits, in float16.

    python examples/equinox_mlp.py --steps 300

Shows the two lines that change in an Equinox loop, with a model that stays in
float32, and what a training in float16 loses without the loss scale.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lossscale as ols


def loss_fn(model, images, labels):
  logits = jax.vmap(model)(images)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  # Small, as losses that are divided by a number of tokens or pixels are.
  return losses.mean() * 2.0**-18


def make_train_step(tx):
  @eqx.filter_jit
  def train_step(model, opt_state, images, labels):
    # differentiated = eqx.filter_value_and_grad(loss_fn)
    value_and_grad_fn = ols.value_and_grad(  # line 2
      ols.autocast(loss_fn), opt_state, using=eqx.filter_value_and_grad
    )
    loss, grads = value_and_grad_fn(model, images, labels)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  return train_step


def train(tx, images, labels, steps, title):
  model = eqx.nn.MLP(64, 10, 128, 1, key=jax.random.key(0))
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
  train_step = make_train_step(tx)
  rng = np.random.default_rng(0)
  for _ in tqdm(range(steps), title):
    batch = rng.choice(1500, 64)
    model, opt_state, _ = train_step(
      model, opt_state, jnp.asarray(images[batch]), jnp.asarray(labels[batch])
    )
  ols.raise_if_stuck(opt_state)
  logits = jax.vmap(model)(jnp.asarray(images[1500:]))
  return jnp.mean(logits.argmax(-1) == labels[1500:]), opt_state


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=300)
  steps = parser.parse_args().steps

  images, labels = load_digits(return_X_y=True)
  images = (images / 16).astype(np.float32)
  # The same step in float32, whatever the loss.
  inner = optax.sgd(2.0**16 * 0.2)

  tx = ols.with_loss_scaling(inner, 1.0)
  accuracy, _ = train(tx, images, labels, steps, "scale of 1")
  print(f"test accuracy with a scale of 1: {accuracy:.3f}")

  # tx = inner
  tx = ols.with_loss_scaling(inner)  # line 1
  accuracy, opt_state = train(tx, images, labels, steps, "dynamic")
  print(f"test accuracy with a dynamic scale: {accuracy:.3f}")
  scale = ols.get_loss_scale_state(opt_state)
  print(f"loss scale {scale.loss_scale:g}, skipped {scale.total_notfinite}")


if __name__ == "__main__":
  main()
