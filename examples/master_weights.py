"""Trains half-precision parameters with and without master weights.

A small network learns to read scikit-learn's digits, at a small learning rate.
Most of its updates are smaller than half a unit in the last place of a bfloat16
parameter, and are lost when they are added. With master weights, they add up.

  python examples/master_weights.py --steps 1000
"""

import argparse
import itertools
import pathlib

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from sklearn.datasets import load_digits
import tqdm

import optax_lossscale as ols

BATCH_SIZE = 256
LAYERS = (64, 128, 128, 10)

OPTIMIZER = optax.adamw(1e-4)
UNSCALED = ols.with_loss_scaling(OPTIMIZER, 1.0)
SCALED = ols.with_loss_scaling(OPTIMIZER)

# Name of the run: (dtype of the parameters and of the model, optimizer).
RUNS = {
  "float32": (jnp.float32, UNSCALED),
  "bfloat16": (jnp.bfloat16, UNSCALED),
  "bfloat16, master weights": (
    jnp.bfloat16,
    ols.with_master_weights(UNSCALED),
  ),
  "float16, master weights, loss scale": (
    jnp.float16,
    ols.with_master_weights(SCALED),
  ),
}


def main():
  args = parse_args()
  data = load_data()
  losses = {}
  with tqdm.tqdm(total=len(RUNS) * args.steps, unit=" steps") as progress:
    for name in RUNS:
      progress.set_description(f"{name:35}")
      losses[name] = train(
        data, *RUNS[name], args.steps, args.seed, progress.update
      )
  print("Training loss at the end:")
  for name, loss in losses.items():
    print(f"{name:35}{loss[-1]:8.4f}")
  plot(losses).savefig(args.out, dpi=150, format="png")
  print(f"The curves are in {args.out}.")


def train(data, dtype, tx, steps=1000, seed=0, on_step=lambda: None):
  """Returns the loss over all images, before each step."""
  init_key, train_key = jax.random.split(jax.random.key(seed))
  params = optax.tree.cast(init_params(init_key), dtype)
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, i):
    batch = sample_batch(jax.random.fold_in(train_key, i), data)
    grads = ols.grad(loss_fn, opt_state)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    full_loss = loss_fn(params, *data)
    return optax.apply_updates(params, updates), opt_state, full_loss

  losses = []
  for i in range(steps):
    params, opt_state, loss = step(params, opt_state, i)
    losses.append(loss)
    on_step()
  return np.array(jax.device_get(losses))


def loss_fn(params, images, labels):
  """The mean cross-entropy, with the model in the dtype of its parameters."""
  *hidden, (last_weight, last_bias) = params
  x = images.astype(last_weight.dtype)
  for weight, bias in hidden:
    x = jax.nn.relu(x @ weight + bias)
  logits = (x @ last_weight + last_bias).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def init_params(key):
  keys = jax.random.split(key, len(LAYERS) - 1)
  return [
    (jax.random.normal(key, (m, n)) * np.sqrt(2 / m), jnp.zeros(n))
    for key, (m, n) in zip(keys, itertools.pairwise(LAYERS), strict=True)
  ]


def load_data():
  """1,797 images with pixels from 0 to 1, and their labels."""
  digits = load_digits()
  return jnp.float32(digits.data / 16), jnp.asarray(digits.target)


def sample_batch(key, data):
  rows = jax.random.choice(key, len(data[0]), (BATCH_SIZE,), replace=False)
  return data[0][rows], data[1][rows]


# The style of each line, and where its name is, as parts of the axes. Three
# lines are in the same place: the lowest is wide, and the highest is dashed.
LINES = {
  "float32": ({"color": "darkgray", "linewidth": 6}, (0.03, 0.36)),
  "bfloat16": ({"color": "tab:red", "linewidth": 2}, (0.88, 0.84)),
  "bfloat16, master weights": (
    {"color": "tab:blue", "linewidth": 2},
    (0.03, 0.27),
  ),
  "float16, master weights, loss scale": (
    {"color": "tab:orange", "linewidth": 2, "linestyle": (0, (3, 3))},
    (0.03, 0.18),
  ),
}


def plot(losses):
  """Draws the losses over the steps, each with its name in its color."""
  figure = Figure(figsize=(7, 3.6), layout="constrained")
  axes = figure.subplots()
  for name, loss in losses.items():
    style, position = LINES[name]
    (line,) = axes.plot(loss, **style)
    axes.text(
      *position,
      name,
      color=line.get_color(),
      transform=axes.transAxes,
      weight="bold",
    )
  axes.set(xlabel="step", ylabel="training loss", yscale="log")
  axes.set_yticks([0.1, 0.2, 0.5, 1, 2], minor=False)
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter("")
  axes.grid(alpha=0.3)
  return figure


def parse_args():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps", type=int, default=1000, help="how long to train (%(default)s)"
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="for all random numbers (%(default)s)"
  )
  parser.add_argument(
    "--out", default="master_weights.png", help="the PNG to draw (%(default)s)"
  )
  args = parser.parse_args()
  # Now, rather than when the training is over.
  if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
  if args.seed < 0:
    parser.error(f"--seed must be at least 0, got {args.seed}")
  if not pathlib.Path(args.out).parent.is_dir():
    parser.error(f"--out must be in a folder that exists, got {args.out}")
  return args


if __name__ == "__main__":
  main()
