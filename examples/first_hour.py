"""A vision transformer in Flax NNX on scikit-learn's digits, in float16.

    python examples/first_hour.py --dtype float32 --seed 0
    python examples/first_hour.py --dtype float32 --seed 1
    python examples/first_hour.py --folder run

A whole program: the two lines that change, with batch statistics, dropout, an
average of the weights, clipping, accumulation, checkpoints and a log. The page
"Tutorial" moves a smaller model step by step.
"""

import argparse
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits
from tqdm import tqdm

import optax_lossscale as ols

BATCH_SIZE = 64
MICRO_BATCHES = 2


class Block(nnx.Module):
  def __init__(self, width, rngs):
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      num_heads=2, in_features=width, decode=False, rngs=rngs
    )
    self.batch_norm = nnx.BatchNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 2 * width, rngs=rngs)
    self.down = nnx.Linear(2 * width, width, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    x = x + self.dropout(self.attention(self.norm(x)))
    return x + self.dropout(self.down(nnx.gelu(self.up(self.batch_norm(x)))))


class ViT(nnx.Module):
  """Float32, and it stays so."""

  def __init__(self, rngs, width=32, depth=2):
    self.embed = nnx.Conv(1, width, (2, 2), strides=2, rngs=rngs)
    self.position = nnx.Param(0.02 * rngs.params.normal((16, width)))
    self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
    self.head = nnx.Linear(width, 10, rngs=rngs)

  def __call__(self, images):
    x = self.embed(images[..., None])
    x = x.reshape(len(x), 16, -1) + self.position
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean(1))


def loss_fn(model, images, labels):
  logits = model(images)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_optimizer(model, dtype):
  tx = optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
    MICRO_BATCHES,
  )
  # In float32 and bfloat16 there is nothing to scale, and NaNs are skipped.
  loss_scale = "dynamic" if dtype == "float16" else 1.0
  tx = ols.with_loss_scaling(tx, loss_scale)  # line 1
  return nnx.Optimizer(model, tx, wrt=nnx.Param)


def make_train_step(dtype):
  cast_loss_fn = ols.autocast(loss_fn, dtype)  # with float32 it is loss_fn

  @nnx.jit
  def train_step(model, average, optimizer, images, labels):
    # The forward pass writes statistics into the model.
    old_stats = jax.tree.map(jnp.asarray, nnx.state(model, nnx.BatchStat))
    # differentiated = nnx.value_and_grad(loss_fn)
    value_and_grad_fn = ols.value_and_grad(  # line 2
      cast_loss_fn, optimizer, using=nnx.value_and_grad
    )
    loss, grads = value_and_grad_fn(model, images, labels)
    optimizer.update(model, grads)
    # What stands outside of the optimizer keeps still on a skipped step.
    stats = nnx.state(model, nnx.BatchStat)
    nnx.update(model, ols.select_if_applied(optimizer, stats, old_stats))
    params = nnx.state(model, nnx.Param)
    moved = optax.incremental_update(params, average, 0.01)
    average = ols.select_if_applied(optimizer, moved, average)
    nothing = jnp.full_like(loss, jnp.nan)
    return average, ols.select_if_applied(optimizer, loss, nothing)

  return train_step


@nnx.jit
def accuracy(model, images, labels):
  logits = ols.autocast(lambda model, images: model(images))(model, images)
  return jnp.mean(logits.argmax(-1) == labels)


def save(folder, run):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, run, force=True)


def restore(folder, run):
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(folder, run)


def main():
  args = parse_args()
  images, labels = load_digits(return_X_y=True)
  images = np.float32(images.reshape(-1, 8, 8) / 16)

  model = ViT(nnx.Rngs(args.seed))
  optimizer = make_optimizer(model, args.dtype)
  average = jax.tree.map(jnp.asarray, nnx.state(model, nnx.Param))
  if args.folder and args.folder.exists():
    run = nnx.state((model, optimizer)), average
    state, average = restore(args.folder, run)
    nnx.update((model, optimizer), state)
  train_step = make_train_step(args.dtype)

  curve = []
  first = int(optimizer.step[...])  # more than 0, if the run goes on
  progress = tqdm(range(first, first + args.steps))
  for step in progress:
    # The rows of a step do not depend on where the run was resumed.
    rng = np.random.default_rng([args.seed, step])
    rows = rng.choice(1500, BATCH_SIZE)
    average, loss = train_step(
      model, average, optimizer, images[rows], labels[rows]
    )
    curve.append(loss)
    if step % 20 == 0:
      ols.raise_if_stuck(optimizer)
      progress.set_postfix(loss=f"{np.nanmean(curve[-20:]):.3f}")
  if args.folder:
    save(args.folder, (nnx.state((model, optimizer)), average))

  model.eval()
  print(f"mean loss of the last 50 steps {np.nanmean(curve[-50:]):.4f}")
  print(f"test accuracy {accuracy(model, images[1500:], labels[1500:]):.3f}")
  nnx.update(model, average)
  print(f"of the average {accuracy(model, images[1500:], labels[1500:]):.3f}")
  scale = ols.get_loss_scale_state(optimizer)
  print(
    f"{args.dtype}: loss scale {scale.loss_scale:g},"
    f" skipped {scale.total_notfinite} of {optimizer.step[...]}"
  )


def parse_args():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--dtype", default="float16", choices=("float32", "bfloat16", "float16")
  )
  parser.add_argument(
    "--folder",
    type=lambda name: pathlib.Path(name).absolute(),
    help="where to save the run; one that is there goes on",
  )
  return parser.parse_args()


if __name__ == "__main__":
  main()
