"""Logs a loss scale to a CSV file and to TensorBoard, and draws the file.

    python examples/log_to_files.py --tensorboard run --out run.png

The metrics are computed in the step and stay on the device. `Log` reads them
once in some steps, and then only that of steps which have ended: the loop never
waits for the step that it has just started. Copy `Log` into your own loop.
"""

import argparse
import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lossscale as ols
from optax_lossscale import plots

# It starts far too high, and grows soon, so that there is something to see.
POLICY = ols.DynamicLossScale(init_scale=2.0**40, growth_interval=50)
TX = ols.with_loss_scaling(optax.adam(3e-3), POLICY)


class Log:
  """Writes the metrics of each step to a row, some steps later.

  Use it in a `with`, at whose end it writes the rest.

  Attributes:
    path: the path of the CSV file, which is overwritten.
    folder: of TensorBoard's files, or None.
    every: after how many steps something is read from the device.
  """

  def __init__(self, path, folder=None, every=50):
    self.path, self.folder, self.every = path, folder, every
    self._kept = []

  def __enter__(self):
    self._file = self.path.open("w", newline="")
    self._csv = None
    self._tensorboard = None
    if self.folder:
      from tensorboardX import SummaryWriter  # not needed for the CSV file

      self._tensorboard = SummaryWriter(str(self.folder))
    return self

  def add(self, step, metrics):
    """Keeps the numbers of a step: a dict of arrays without axes."""
    self._kept.append((step, metrics))
    # The later half may belong to steps that still run.
    if len(self._kept) == 2 * self.every:
      self._write(self.every)

  def __exit__(self, *error):
    self._write(len(self._kept))
    self._file.close()
    if self._tensorboard:
      self._tensorboard.close()

  def _write(self, count):
    kept, self._kept = self._kept[:count], self._kept[count:]
    steps = [step for step, _ in kept]
    read = jax.device_get([metrics for _, metrics in kept])  # all at once
    for step, metrics in zip(steps, read, strict=True):
      row = {name: float(x) for name, x in metrics.items()}
      if self._csv is None:
        self._csv = csv.DictWriter(self._file, ["step", *row])
        self._csv.writeheader()
      self._csv.writerow({"step": step} | row)
      if self._tensorboard:
        for name, x in row.items():
          if not np.isnan(x):
            self._tensorboard.add_scalar(name, x, step)
    self._file.flush()  # so that it can be read while the run continues


def read(path):
  """The columns of a file that Log wrote, as arrays by their names."""
  table = np.genfromtxt(path, delimiter=",", names=True)
  return {name: np.atleast_1d(table[name]) for name in table.dtype.names}


def draw(path, picture):
  """The loss, and the loss scale with the skipped steps, of a file."""
  from matplotlib.figure import Figure  # needs no display

  columns = read(path)
  figure = Figure(figsize=(8, 5), layout="constrained")
  top, bottom = figure.subplots(2, sharex=True)
  top.semilogy(columns["step"], columns["loss"])
  top.set_ylabel("loss of the applied steps")
  plots.plot_loss_scale(columns, ax=bottom)
  figure.savefig(picture, dpi=100)


def loss_fn(params, images, labels):
  w1, w2 = params
  logits = jnp.tanh(images @ w1) @ w2
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(params, opt_state, images, labels):
  value_and_grad_fn = ols.value_and_grad(ols.autocast(loss_fn), opt_state)
  loss, grads = value_and_grad_fn(params, images, labels)
  updates, opt_state = TX.update(grads, opt_state, params)
  # Numbers of a skipped step may be inf or NaN, and each mean with them.
  applied = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
  nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), applied)
  metrics = ols.select_if_applied(opt_state, applied, nothing)
  metrics |= ols.loss_scale_metrics(opt_state, policy=POLICY)
  return optax.apply_updates(params, updates), opt_state, metrics


def main():
  args = parse_args()
  images, labels = load_digits(return_X_y=True)
  images = np.float32(images / 16)
  keys = jax.random.split(jax.random.key(0))
  params = (
    jax.random.normal(keys[0], (64, 128)) / 8,
    jax.random.normal(keys[1], (128, 10)) / 11,
  )
  opt_state = TX.init(params)
  rng = np.random.default_rng(0)
  with Log(args.csv, args.tensorboard, args.every) as log:
    for step in tqdm(range(args.steps)):
      rows = rng.choice(1500, 64)
      params, opt_state, metrics = train_step(
        params, opt_state, images[rows], labels[rows]
      )
      log.add(step, metrics)

  columns = read(args.csv)
  losses = columns["loss"][-50:]
  print(f"mean loss of the last 50 steps {np.nanmean(losses):.3f}")
  print(
    f"loss scale {columns['loss_scale'][-1]:g},"
    f" skipped {columns['step_skipped'].sum():g} of {args.steps}"
  )
  if args.out:
    draw(args.csv, args.out)


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=500)
  parser.add_argument("--every", type=int, default=50)
  parser.add_argument("--csv", type=pathlib.Path, default="run.csv")
  parser.add_argument("--tensorboard", type=pathlib.Path)
  parser.add_argument("--out", type=pathlib.Path, help="draws a picture")
  return parser.parse_args()


if __name__ == "__main__":
  main()
