"""Trains a small transformer in float16 to write Python, letter by letter.

The text is the source of Python's own standard library. The model is written in
float32, and ``autocast`` runs its matmuls in float16. A probe in each layer
records its cotangents, and the policy receives the largest.

  python examples/transformer.py --policy headroom --steps 500
"""

import argparse
import functools
import pathlib
import sysconfig
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import tqdm

import optax_lossscale as ols

LAYERS = 3
WIDTH = 96
HEADS = 4
CONTEXT = 64  # letters
BATCH_SIZE = 16
LEARNING_RATE = 3e-3

LETTERS = "\n" + "".join(map(chr, range(32, 127)))

POLICIES = {
  "none": ols.FixedLossScale(1.0),
  "fixed": ols.FixedLossScale(2.0**15),
  "dynamic": ols.DynamicLossScale(),
  "headroom": ols.HeadroomLossScale(),
}


class Run(NamedTuple):
  """The results of a training run."""

  params: dict
  loss_scale_state: ols.LossScaleState
  losses: np.ndarray  # of each step
  scales: np.ndarray  # of each step
  skipped: np.ndarray  # of each step: was it?
  counts: np.ndarray  # of the last step, layer by layer
  test_loss: float


def main():
  args = parse_args()
  text = load_text()
  print(f"{text[0].size:,} letters to learn from, {text[1].size:,} to test.")
  with tqdm.tqdm(total=args.steps, unit=" steps") as progress:

    def on_step(loss):
      progress.update()
      progress.set_postfix_str(f"loss {loss:.2f}", refresh=False)

    policy = POLICIES[args.policy]
    run = train(text, policy, args.steps, args.seed, on_step, args.dtype)
  plot(run).savefig(args.out, dpi=150, format="png")
  print(make_table(run))
  print(f"The curves are in {args.out}. A sample:\n")
  print(sample(run.params, "def ", 300, args.seed))


def train(
  text,
  loss_scale,
  steps,
  seed=0,
  on_step=lambda loss: None,
  dtype=jnp.float16,
):
  """Train a float32 model whose matmuls run in dtype."""
  train_text, test_text = text
  params = init_params(jax.random.key(seed))
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, LEARNING_RATE, min(50, steps // 5), steps
  )
  tx = ols.with_loss_scaling(optax.adamw(schedule), loss_scale, max_norm=1.0)
  opt_state = tx.init(params)
  counters = ols.diagnostics.probe_counters(LAYERS)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch):
    loss, (grads, counts) = ols.value_and_grad(
      ols.autocast(loss_fn, dtype), opt_state, argnums=(0, 1)
    )(params, counters, batch)
    evidence = ols.diagnostics.probe_update_kwargs(counts, opt_state)
    updates, opt_state = tx.update(grads, opt_state, params, **evidence)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss, counts

  rng = np.random.default_rng(seed)
  history = []
  for _ in range(steps):
    scale = ols.get_loss_scale_state(opt_state).loss_scale.copy()
    params, opt_state, loss, counts = step(
      params, opt_state, sample_batch(rng, train_text)
    )
    skipped = ~ols.get_loss_scale_state(opt_state).last_finite
    history.append((loss, scale, skipped))
    on_step(loss)

  ols.raise_if_stuck(opt_state)
  losses, scales, skips = zip(*jax.device_get(history), strict=True)
  rng = np.random.default_rng(0)
  test = [sample_batch(rng, test_text) for _ in range(20)]
  test_loss = np.mean([jax.jit(loss_fn)(params, counters, x) for x in test])
  return Run(
    params,
    ols.get_loss_scale_state(opt_state),
    losses=np.array(losses),
    scales=np.array(scales),
    skipped=np.array(skips),
    counts=np.asarray(counts),
    test_loss=test_loss.item(),
  )


def loss_fn(params, counters, batch):
  """The mean cross-entropy of each next letter, in nats."""
  logits = model(params, counters, batch[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
  return jnp.mean(losses)


def model(params, counters, letters):
  """Logits of the next letter, of shape (batch, letter, 96)."""
  x = params["embedding"][letters] + params["position"][: letters.shape[1]]

  def layer(x, layer_and_counter):
    weights, counter = layer_and_counter
    x = ols.diagnostics.probe(x, counter)
    x = x + attend(weights, jax.nn.standardize(x))
    hidden = jax.nn.gelu(jax.nn.standardize(x) @ weights["expand"])
    return x + hidden @ weights["contract"], None

  x, _ = jax.lax.scan(layer, x, (params["layers"], counters))
  return jax.nn.standardize(x) @ params["embedding"].T


def attend(weights, x):
  """Causal self-attention."""
  batch, length, _ = x.shape
  parts = (x @ weights["qkv"]).reshape(batch, length, 3, HEADS, -1)
  query, key, value = jnp.moveaxis(parts, 2, 0)
  scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH / HEADS)
  scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
  return mixed.reshape(x.shape) @ weights["out"]


def init_params(key):
  keys = iter(jax.random.split(key, 6))

  def normal(*shape, scale):
    return scale * jax.random.normal(next(keys), shape)

  small = WIDTH**-0.5
  return {
    "embedding": normal(len(LETTERS), WIDTH, scale=small),
    "position": normal(CONTEXT, WIDTH, scale=small),
    "layers": {
      "qkv": normal(LAYERS, WIDTH, 3 * WIDTH, scale=small),
      "out": normal(LAYERS, WIDTH, WIDTH, scale=small / LAYERS),
      "expand": normal(LAYERS, WIDTH, 4 * WIDTH, scale=small),
      "contract": normal(LAYERS, 4 * WIDTH, WIDTH, scale=small / LAYERS),
    },
  }


def load_text():
  """The modules of the standard library, as indices into LETTERS.

  Returns:
    The text to learn from, and the text to test with: each tenth module.
  """
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  files = sorted(folder.glob("*.py"))
  return tuple(
    to_letters("".join(file.read_text("utf-8") for file in part))
    for part in ([f for f in files if f not in files[::10]], files[::10])
  )


def to_letters(text):
  codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
  indices = np.full(256, -1)
  indices[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
  found = indices[codes]
  return found[found >= 0].astype(np.int32)


def sample_batch(rng, text):
  """Random stretches of the text, each a letter longer than the context."""
  starts = rng.integers(text.size - CONTEXT, size=(BATCH_SIZE, 1))
  return text[starts + np.arange(CONTEXT + 1)]


def sample(params, start, length, seed):
  """Lets the model write on."""
  counters = ols.diagnostics.probe_counters(LAYERS)
  text = list(to_letters(start))
  key = jax.random.key(seed)

  @jax.jit
  def next_letter(key, window, last):
    logits = model(params, counters, window)[0, last]
    return jax.random.categorical(key, logits / 0.7)

  for i in range(length):
    window = np.zeros((1, CONTEXT), np.int32)
    recent = text[-CONTEXT:]
    window[0, : len(recent)] = recent
    at = len(recent) - 1
    text.append(next_letter(jax.random.fold_in(key, i), window, at).item())
  return "".join(LETTERS[i] for i in text)


def make_table(run):
  """Return a summary of the run, and of the last step's cotangents."""
  metrics = jax.device_get(
    ols.diagnostics.probe_metrics(jnp.asarray(run.counts))
  )
  lines = [
    f"test loss {run.test_loss:.3f}, {run.skipped.sum()} steps skipped,"
    f" last scale {run.scales[-1]:g}",
    "layer   largest cotangent   zeros   near the top",
  ]
  for i in range(LAYERS):
    lines.append(
      f"{i:5}{metrics['amax'][i]:20.5g}{metrics['zero_fraction'][i]:8.2%}"
      f"{metrics['near_overflow_fraction'][i]:15.2%}"
    )
  return "\n".join(lines)


def plot(run):
  """Draws the loss and the loss scale over the steps."""
  figure = Figure(figsize=(8, 6), layout="constrained")
  top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
  top.plot(run.losses, linewidth=1)
  top.set_title("Learning to write Python")
  top.set(ylabel="training loss (nats a letter)")
  bottom.plot(run.scales, linewidth=1)
  (skipped,) = np.nonzero(run.skipped)
  bottom.plot(skipped, run.scales[skipped], "x", label="skipped steps")
  bottom.set(xlabel="step", ylabel="loss scale")
  bottom.set_yscale("log", base=2)
  bottom.legend()
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
  return figure


def parse_args():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps", type=int, default=500, help="how long to train (%(default)s)"
  )
  parser.add_argument(
    "--policy",
    choices=POLICIES,
    default="headroom",
    help="the policy of the loss scale (%(default)s)",
  )
  parser.add_argument(
    "--dtype",
    choices=("float16", "bfloat16", "float32"),
    default="float16",
    help="the dtype of matmuls (%(default)s)",
  )
  parser.add_argument(
    "--seed", type=int, default=0, help="for all random numbers (%(default)s)"
  )
  parser.add_argument(
    "--out", default="transformer.png", help="the PNG to draw (%(default)s)"
  )
  args = parser.parse_args()
  # Now, rather than when the training is over.
  if args.steps < 10:
    parser.error(f"--steps must be at least 10, got {args.steps}")
  if args.seed < 0:
    parser.error(f"--seed must be at least 0, got {args.seed}")
  if not pathlib.Path(args.out).parent.is_dir():
    parser.error(f"--out must be in a folder that exists, got {args.out}")
  return args


if __name__ == "__main__":
  main()
