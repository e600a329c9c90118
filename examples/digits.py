"""Trains an autoencoder in float32, and in float16 with and without scaling.

It learns to remove noise from scikit-learn's digits. This process plays one of
1,024 data-parallel workers: the loss is the mean over the batch of all of them,
so what it differentiates is its own mean / 1,024. The more workers, the smaller
each number in the backward pass, and what is below 2**-25 is zero in float16.
"""

import argparse
import itertools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from sklearn.datasets import load_digits
import tqdm

import optax_lossscale as ols

WORKERS = 1024
BATCH_SIZE = 512  # of this worker
LAYERS = (64, 128, 32, 128, 64)
NOISE = 0.25
LEARNING_RATE = 3e-3


def in_float32(loss_fn):
  """The loss as it is written."""
  return loss_fn


def by_hand(loss_fn):
  """The loss with parameters and images cast to float16, before all else."""

  def half_loss_fn(params, noisy, clean):
    half = jax.tree.map(lambda x: x.astype(jnp.float16), (params, noisy))
    return loss_fn(*half, clean)

  return half_loss_fn


# Name of the run: (what casts the loss function, loss scale).
RUNS = {
  "float32": (in_float32, 1.0),
  "float16, no scaling": (by_hand, 1.0),
  "float16, fixed scale of 8": (by_hand, 8.0),
  "float16, dynamic scale": (by_hand, "dynamic"),
  "float16 by autocast": (ols.autocast, "dynamic"),
  # Far too high, and raised every 100 steps: it falls, settles and climbs.
  "float16, starts too high": (
    by_hand,
    ols.DynamicLossScale(init_scale=2.0**40, growth_interval=100),
  ),
  # `update` is given the sum over 2**10 workers, of which each has a part.
  "float16, headroom": (by_hand, ols.HeadroomLossScale(margin=4 - 10)),
}

# The runs of the small picture, which shows only their losses.
FEW = "float32", "float16, no scaling", "float16, dynamic scale"

# The names of these runs are below their lines, since another line is above.
BELOW = "float16, no scaling", "float16 by autocast", "float16, headroom"

COLUMNS = """\
test MSE           mean squared error of the test images
times float32      this error, divided by that of float32
skipped steps      steps whose gradients overflowed, which changed no parameter
final scale        loss scale after the last step
gradients flushed  entries of the gradient that float16 turns into zeros
cosine to float32  1 if the gradient has the direction of the float32 gradient

The last two compare all gradients at the same parameters, those of float32.
"""


class Run(NamedTuple):
  """The results of a training run."""

  params: list  # of (weight, bias), float32
  loss_scale_state: ols.LossScaleState
  losses: np.ndarray  # of each step
  scales: np.ndarray  # of each step
  skipped: np.ndarray  # of each step: was it?
  test_loss: float


def main():
  args = parse_args()
  data = load_data(args.seed)
  runs = {}
  names = FEW if args.small else RUNS
  with tqdm.tqdm(total=len(names) * args.steps, unit=" steps") as progress:
    for name in names:
      progress.set_description(f"{name:25}")
      runs[name] = train(data, *RUNS[name], progress, args.steps, args.seed)
  print(make_table(runs, data), COLUMNS, sep="\n\n")
  if args.small:
    plot_losses(runs).savefig(args.out, dpi=100, format="png")
  else:
    plot(runs).savefig(args.out, dpi=150, format="png")
  print(f"The curves are in {args.out}.")


def train(data, cast, loss_scale, progress, steps=1200, seed=0):
  """Trains float32 parameters, with a loss that is cast."""
  train_set, test_set = data
  init_key, train_key, test_key = jax.random.split(jax.random.key(seed), 3)
  params = init_params(init_key)
  tx = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
  tx = ols.with_loss_scaling(tx, loss_scale)  # The first changed line.
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, i):
    batch = sample_batch(jax.random.fold_in(train_key, i), train_set)
    # The second changed line: `jax.value_and_grad(cast(worker_loss))` before.
    loss, grads = ols.value_and_grad(cast(worker_loss), opt_state)(
      params, *batch
    )
    # These are true gradients, in float32. Add up the workers'; all are alike.
    grads = jax.tree.map(lambda g: WORKERS * g, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, WORKERS * loss

  history = []
  for i in range(steps):
    scale = ols.get_loss_scale_state(opt_state).loss_scale
    params, opt_state, loss = step(params, opt_state, i)
    if i == 0:
      progress.unpause()  # Leaves out the time of the compilation.
    skipped = ~ols.get_loss_scale_state(opt_state).last_finite
    history.append((loss, scale, skipped))
    progress.update()

  ols.raise_if_stuck(opt_state)
  losses, scales, skips = zip(*jax.device_get(history), strict=True)
  noisy = add_noise(test_key, test_set)
  return Run(
    params,
    ols.get_loss_scale_state(opt_state),
    losses=np.array(losses),
    scales=np.array(scales),
    skipped=np.array(skips),
    test_loss=cast(reconstruction_loss)(params, noisy, test_set).item(),
  )


def worker_loss(params, noisy, clean):
  """This worker's part of the mean over the batch of all workers."""
  return reconstruction_loss(params, noisy, clean) / WORKERS


def reconstruction_loss(params, x, clean):
  """The mean squared error of what the model makes of noisy images x."""
  *hidden, (last_weight, last_bias) = params
  for weight, bias in hidden:
    x = jnp.tanh(x @ weight + bias)
  x = x @ last_weight + last_bias
  return jnp.mean((x - clean) ** 2)  # In float32, as clean is.


def init_params(key):
  keys = jax.random.split(key, len(LAYERS) - 1)
  return [
    (jax.random.normal(key, (m, n)) / np.sqrt(m), jnp.zeros(n))
    for key, (m, n) in zip(keys, itertools.pairwise(LAYERS), strict=True)
  ]


def load_data(seed):
  """1,500 images to train with and 297 to test, pixels from 0 to 1."""
  images = load_digits().data.astype(np.float32) / 16
  images = np.random.default_rng(seed).permutation(images)
  return jnp.asarray(images[:1500]), jnp.asarray(images[1500:])


def sample_batch(key, images):
  """Noisy images, and the same without the noise."""
  batch_key, noise_key = jax.random.split(key)
  clean = jax.random.choice(batch_key, images, (BATCH_SIZE,), replace=False)
  return add_noise(noise_key, clean), clean


def add_noise(key, images):
  return images + NOISE * jax.random.normal(key, images.shape)


def make_table(runs, data):
  """A line of text for each run."""
  lines = [
    "                            test    times  skipped  final"
    "  gradients  cosine to",
    "                             MSE  float32    steps  scale"
    "    flushed    float32",
  ]
  reference = runs["float32"]
  for name, run in runs.items():
    skipped = run.loss_scale_state.total_notfinite
    scale = run.loss_scale_state.loss_scale
    flushed, cosine = compare_gradients(name, run, reference.params, data)
    lines.append(
      f"{name:25}{run.test_loss:8.4f}"
      f"{run.test_loss / reference.test_loss:9.3f}"
      f"{skipped:9}{f'2**{np.log2(scale):.0f}':>7}{flushed:11.1%}{cosine:11.4f}"
    )
  return "\n".join(lines)


def compare_gradients(name, run, params, data):
  """Compares the weights' gradients of a run with those of float32.

  Args:
    name: the name of the run.
    run: the run, whose last loss scale is used.
    params: where to differentiate: at the same place for all runs.
    data: the result of load_data.

  Returns:
    The share of entries flushed to zero, and the cosine of the angle between
    the two gradients; NaN if one is zero or infinite.
  """
  batch = sample_batch(jax.random.key(0), data[0])

  def weight_gradient(cast):
    grad_fn = ols.grad(cast(worker_loss), run.loss_scale_state)
    grads = jax.jit(grad_fn)(params, *batch)
    # float64, in which their squares do not underflow.
    return np.concatenate([np.float64(weight).ravel() for weight, _ in grads])

  exact, grad = weight_gradient(in_float32), weight_gradient(RUNS[name][0])
  flushed = np.mean(grad[exact != 0] == 0)
  norms = np.linalg.norm(exact) * np.linalg.norm(grad)
  return flushed, exact @ grad / norms if 0 < norms < np.inf else np.nan


def plot(runs):
  """Draws the losses and the loss scales over the steps."""
  styles = (
    {"color": "0.6", "linewidth": 6},
    {"color": "tab:red", "linewidth": 1.5},
    {"color": "tab:orange", "linewidth": 3},
    {"color": "tab:blue", "linewidth": 3},
    {"color": "tab:cyan", "linewidth": 1, "linestyle": "--"},
    {"color": "tab:green", "linewidth": 1},
    {"color": "tab:purple", "linewidth": 1},
  )
  figure = Figure(figsize=(8, 8), layout="constrained")
  top, bottom = figure.subplots(2, sharex=True, height_ratios=(1, 1))
  for (name, run), style in zip(runs.items(), styles, strict=True):
    top.plot(run.losses, label=name, **style)
    if name != "float32":
      bottom.plot(run.scales, **style)
      (skipped,) = np.nonzero(run.skipped)
      bottom.plot(skipped, run.scales[skipped], "x", color=style["color"])
      quarter = run.scales.size // 4
      label_at = quarter, run.scales[quarter]
      above = name not in BELOW
      bottom.annotate(
        name,
        label_at,
        (0, 10 if above else -10),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        color=style["color"],
      )
  top.set_title("Removing noise from digits, as one of 1,024 workers")
  top.set(ylabel="training loss (mean squared error)", yscale="log")
  top.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], minor=False)
  top.yaxis.set_major_formatter("{x:g}")
  top.yaxis.set_minor_formatter("")
  top.legend(labelcolor="linecolor")
  bottom.set(xlabel="step", ylabel="loss scale (x: a skipped step)")
  bottom.set_yscale("log", base=2)
  bottom.margins(y=0.15)
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
  return figure


def plot_losses(runs):
  """Draws the losses of a few runs, for a small picture."""
  figure = Figure(figsize=(6.4, 2.6), layout="constrained")
  axes = figure.subplots()
  styles = (
    {"color": "0.6", "linewidth": 5},
    {"color": "tab:red", "linewidth": 1},
    {"color": "tab:blue", "linewidth": 1},
  )
  for (name, run), style in zip(runs.items(), styles, strict=True):
    axes.plot(run.losses, label=name, **style)
  axes.set(xlabel="step", ylabel="training loss", yscale="log")
  axes.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], minor=False)
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter("")
  axes.grid(alpha=0.3)
  axes.legend(labelcolor="linecolor")
  return figure


def parse_args():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps", type=int, default=1200, help="how long to train (%(default)s)"
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="for all random numbers (%(default)s)"
  )
  parser.add_argument(
    "--out", default="digits.png", help="the PNG to draw (%(default)s)"
  )
  parser.add_argument(
    "--small", action="store_true", help="the picture of the README: three runs"
  )
  args = parser.parse_args()
  # Now, rather than when the training is over.
  if args.steps < 2:
    parser.error(f"--steps must be at least 2, got {args.steps}")
  if args.seed < 0:
    parser.error(f"--seed must be at least 0, got {args.seed}")
  if not pathlib.Path(args.out).parent.is_dir():
    parser.error(f"--out must be in a folder that exists, got {args.out}")
  return args


if __name__ == "__main__":
  main()
