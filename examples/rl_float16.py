"""Teaches a small transformer to count, by GRPO, in three precisions.

The model is given a direction and a digit, and writes 8 digits more. It is
rewarded for each digit that goes on from the one before: up, 7, 8, 9, 0, 1 and
so on. There are no labels.

Two programs compute the probability of a digit. The sampler writes digit by
digit, with a cache of keys and values. The trainer sees a whole text at once.
Both use the same weights and dtype, but they round at different places, and so
their probabilities differ: the trainer learns from texts that another policy
wrote. This script measures by how much, and what comes of it.

  python examples/rl_float16.py --steps 100 --seeds 3
"""

import argparse
import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
import numpy as np
import optax
import tqdm

import optax_lossscale as ols

LAYERS = 3
WIDTH = 32
HEADS = 4
LENGTH = 8  # digits to write
UP, DOWN, LETTERS = 10, 11, 12  # the digits come first

PROMPTS = 32  # in each step
GROUP = 8  # answers to each prompt, which are compared with each other
MICRO_BATCHES = 4
LEARNING_RATE = 5e-3
CLIP = 0.2  # of the ratio of the two probabilities

# Name: (dtype that the model computes in, loss scale).
PRECISIONS = {
  "bfloat16": (jnp.bfloat16, 1.0),
  "float16": (jnp.float16, ols.HeadroomLossScale()),
  "float32": (jnp.float32, 1.0),
}


class Run(NamedTuple):
  """The results of a training run, with an entry for each step."""

  rewards: np.ndarray  # share of digits that are right
  rms: np.ndarray  # of the difference of the log-probabilities
  kl: np.ndarray  # from the sampler to the trainer, nats a digit
  loss_scale_state: ols.LossScaleState


def main():
  args = parse_args()
  jax.config.update("jax_num_cpu_devices", args.devices)
  mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
  print(f"{PROMPTS * GROUP} answers a step, on {jax.device_count()} devices.")
  runs = {}
  total = len(PRECISIONS) * args.seeds * args.steps
  with tqdm.tqdm(total=total, unit=" steps") as progress:
    for name, (dtype, loss_scale) in PRECISIONS.items():
      progress.set_description(f"{name:8}")
      program = make_program(mesh, dtype, loss_scale)
      runs[name] = [
        train(program, args.steps, seed, progress.update)
        for seed in range(args.seeds)
      ]
  print(make_table(runs))
  print(make_curves(runs))
  plot(runs).savefig(args.out, dpi=150, format="png")
  print(f"The curves are in {args.out}.")


def make_program(mesh, dtype, loss_scale):
  """The functions that start a run and take a step, compiled for all seeds."""
  tx = ols.with_loss_scaling(
    optax.adam(LEARNING_RATE), loss_scale, max_norm=1.0
  )
  # The answers are split over the devices, all else is on each of them. `jit`
  # computes as on a single device: all apply a step, or all skip it.
  split = NamedSharding(mesh, P("data"))
  whole = NamedSharding(mesh, P())

  @functools.partial(jax.jit, out_shardings=whole)
  def start(seed):
    params = init_params(jax.random.key(seed))
    return params, tx.init(params)

  @functools.partial(
    jax.jit,
    donate_argnums=(0, 1),
    out_shardings=whole,
    # Round wherever the program says so, as kernels that store their results.
    compiler_options={"xla_allow_excess_precision": False},
  )
  def step(params, opt_state, key):
    prompts = jnp.repeat(sample_prompts(key), GROUP, axis=0)
    prompts = jax.lax.with_sharding_constraint(prompts, split)
    text, logps = sample(cast(params, dtype), prompts, key)
    rewards = reward(text)
    batch = text, logps, standardize_in_groups(rewards)

    def add_micro_batch(total, micro_batch):
      grad_fn = ols.grad(loss_fn, opt_state, has_aux=True)
      grads, new_logps = grad_fn(params, *micro_batch, dtype)
      return jax.tree.map(jnp.add, total, grads), new_logps

    grads, new_logps = jax.lax.scan(
      add_micro_batch, optax.tree.zeros_like(params), to_micro_batches(batch)
    )
    grads = jax.tree.map(lambda g: g / MICRO_BATCHES, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = jnp.mean(rewards), *compare(to_micro_batches(logps), new_logps)
    return params, opt_state, jnp.stack(metrics)

  return start, step


def train(program, steps, seed, on_step=lambda: None):
  """Trains for some steps, and measures sampler against trainer."""
  start, step = program
  params, opt_state = start(seed)
  key = jax.random.key(seed + 1_000)
  history = []
  for i in range(steps):
    params, opt_state, metrics = step(
      params, opt_state, jax.random.fold_in(key, i)
    )
    # Waits: devices that are made of one CPU may block each other otherwise.
    history.append(np.asarray(metrics))
    ols.raise_if_stuck(opt_state)
    on_step()
  rewards, rms, kl = np.array(history).T
  return Run(rewards, rms, kl, ols.get_loss_scale_state(opt_state))


def loss_fn(params, text, logps, advantages, dtype):
  """The clipped loss of GRPO, float32, and the trainer's log-probabilities."""
  new_logps = score(cast(params, dtype), text)
  ratio = jnp.exp(new_logps - logps)
  clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
  gain = jnp.minimum(ratio * advantages, clipped * advantages)
  return -jnp.mean(gain), new_logps


def standardize_in_groups(rewards):
  """How much better each answer is than the others to the same prompt."""
  groups = rewards.reshape(PROMPTS, GROUP)
  groups = jax.nn.standardize(groups, axis=1, epsilon=1e-4)
  return groups.reshape(-1, 1)


def compare(logps, new_logps):
  """The rms of the difference, and the divergence, of the two policies."""
  difference = new_logps - logps
  # An estimate that is never negative, of which the first terms cancel.
  terms = jnp.expm1(difference) - difference
  small = difference**2 / 2 + difference**3 / 6
  terms = jnp.where(jnp.abs(difference) < 0.01, small, terms)
  return jnp.sqrt(jnp.mean(difference**2)), jnp.mean(terms)


def to_micro_batches(tree):
  """Each micro-batch has a part of the answers of each device."""
  parts = lambda x: x.reshape(-1, MICRO_BATCHES, *x.shape[1:])
  return jax.tree.map(lambda x: jnp.moveaxis(parts(x), 1, 0), tree)


# The task.


def sample_prompts(key):
  """A direction and a digit for each; int32, of shape (PROMPTS, 2)."""
  keys = jax.random.split(key)
  direction = jax.random.randint(keys[0], (PROMPTS,), UP, DOWN + 1)
  digit = jax.random.randint(keys[1], (PROMPTS,), 0, 10)
  return jnp.stack([direction, digit], axis=1)


def reward(text):
  """The share of the digits that go on from the one before."""
  step = jnp.where(text[:, :1] == UP, 1, -1)
  wanted = (text[:, 1:-1] + step) % 10
  return jnp.mean(text[:, 2:] == wanted, axis=1)


# The model: what the sampler and the trainer share, and then each of them.


def init_params(key):
  keys = iter(jax.random.split(key, 6))

  def normal(*shape, scale):
    return scale * jax.random.normal(next(keys), shape)

  small = WIDTH**-0.5
  return {
    "embedding": normal(LETTERS, WIDTH, scale=1.0),
    "position": normal(LENGTH + 2, WIDTH, scale=0.1),
    "head": jnp.zeros((WIDTH, 10)),
    "layers": {
      "qkv": normal(LAYERS, WIDTH, 3 * WIDTH, scale=small),
      "out": normal(LAYERS, WIDTH, WIDTH, scale=small / 2),
      "expand": normal(LAYERS, WIDTH, 4 * WIDTH, scale=small),
      "contract": normal(LAYERS, 4 * WIDTH, WIDTH, scale=small / 4),
    },
  }


def cast(params, dtype):
  return jax.tree.map(lambda x: x.astype(dtype), params)


def normalize(x):
  """To mean 0 and variance 1, computed in float32."""
  return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def split_heads(weights, x):
  """Queries, keys and values, each of shape (..., HEADS, WIDTH // HEADS)."""
  parts = normalize(x) @ weights["qkv"]
  return jnp.moveaxis(parts.reshape(*x.shape[:-1], 3, HEADS, -1), -3, 0)


def feed_forward(weights, x):
  return jax.nn.gelu(normalize(x) @ weights["expand"]) @ weights["contract"]


def log_probabilities(params, x):
  """The logits of all digits, float32."""
  logits = normalize(x) @ params["head"]
  return jax.nn.log_softmax(logits.astype(jnp.float32))


def score(params, text):
  """The trainer: log-probabilities of the digits of whole texts at once."""
  letters = text[:, :-1]
  length = letters.shape[1]
  x = params["embedding"][letters] + params["position"][:length]

  def layer(x, weights):
    x = x + attend(*split_heads(weights, x)) @ weights["out"]
    return x + feed_forward(weights, x), None

  x, _ = jax.lax.scan(layer, x, params["layers"])
  logps = log_probabilities(params, x[:, 1:])
  return jnp.take_along_axis(logps, text[:, 2:, None], axis=-1)[..., 0]


def attend(query, key, value):
  """The trainer's causal attention: each matmul is rounded to its dtype."""
  length = query.shape[1]
  scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
  scores = scores / np.sqrt(WIDTH / HEADS)
  scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
  weighted = jax.nn.softmax(scores).astype(query.dtype)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weighted, value)
  return mixed.reshape(*mixed.shape[:2], WIDTH)


def sample(params, prompts, key):
  """The sampler: writes digit by digit, with a cache of keys and values.

  Returns:
    The texts with their prompts, and the log-probability of each digit.
  """
  shape = LAYERS, len(prompts), LENGTH + 1, HEADS, WIDTH // HEADS
  cache = jnp.zeros((2, *shape), params["embedding"].dtype)
  _, cache = next_digit(params, prompts[:, 0], 0, cache)

  def write_digit(carry, i):
    letter, cache = carry
    logps, cache = next_digit(params, letter, i + 1, cache)
    digit = jax.random.categorical(jax.random.fold_in(key, i), logps)
    logp = jnp.take_along_axis(logps, digit[:, None], axis=-1)[:, 0]
    return (digit, cache), (digit, logp)

  _, (digits, logps) = jax.lax.scan(
    write_digit, (prompts[:, 1], cache), jnp.arange(LENGTH)
  )
  return jnp.concatenate([prompts, digits.T], axis=1), logps.T


def next_digit(params, letter, at, cache):
  """Log-probabilities behind one letter, and the cache with it."""
  x = (params["embedding"][letter] + params["position"][at])[:, None]
  mask = jnp.arange(LENGTH + 1) <= at

  def layer(x, weights_and_cache):
    weights, (keys, values) = weights_and_cache
    query, key, value = split_heads(weights, x)
    keys = jax.lax.dynamic_update_slice_in_dim(keys, key, at, 1)
    values = jax.lax.dynamic_update_slice_in_dim(values, value, at, 1)
    mixed = attend_to_cache(query[:, 0], keys, values, mask)
    x = x + mixed[:, None] @ weights["out"]
    return x + feed_forward(weights, x), (keys, values)

  cache = cache[0], cache[1]
  x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
  return log_probabilities(params, x[:, 0]), jnp.stack(cache)


def attend_to_cache(query, keys, values, mask):
  """The sampler's attention for one letter, as one fused kernel computes it.

  Scores stay in float32, and the division by their sum comes last.
  """
  matmul = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = matmul("bhd,bkhd->bhk", query, keys) / np.sqrt(WIDTH / HEADS)
  scores = jnp.where(mask, scores, -jnp.inf)
  weighted = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
  mixed = matmul("bhk,bkhd->bhd", weighted.astype(values.dtype), values)
  mixed = mixed / jnp.sum(weighted, axis=-1)[..., None]
  return mixed.reshape(-1, WIDTH).astype(query.dtype)


# What is printed and drawn.


def make_table(runs):
  """A line for each precision: means over steps and seeds."""
  lines = [
    "             rms of            KL   reward of the last steps,"
    "     steps      last",
    "           log-probs     (nats)     seed by seed             "
    "   skipped     scale",
  ]
  for name, seeds in runs.items():
    states = [run.loss_scale_state for run in seeds]
    last = max(1, len(seeds[0].rewards) // 10)
    rewards = "  ".join(f"{run.rewards[-last:].mean():.3f}" for run in seeds)
    lines.append(
      f"{name:9}{np.mean([run.rms for run in seeds]):11.2e}"
      f"{np.mean([run.kl for run in seeds]):11.2e}     {rewards:25}"
      f"{sum(s.total_notfinite.item() for s in states):10}"
      f"{'2**' + str(int(np.log2(states[-1].loss_scale))):>10}"
    )
  return "\n".join(lines)


def make_curves(runs):
  """The rewards at some steps: a line for each seed."""
  steps = len(next(iter(runs.values()))[0].rewards)
  shown = np.unique(np.linspace(0, steps - 1, 9).astype(int))
  lines = ["\nreward at step     " + "".join(f"{i:7}" for i in shown)]
  for name, seeds in runs.items():
    for i, run in enumerate(seeds):
      rewards = "".join(f"{reward:7.3f}" for reward in run.rewards[shown])
      lines.append(f"{name:9} seed {i:<4}{rewards}")
  return "\n".join(lines) + "\n"


def plot(runs):
  """Draws rewards, and the divergence of the two policies, over the steps."""
  figure = Figure(figsize=(8, 7), layout="constrained")
  top, bottom = figure.subplots(2, sharex=True)
  colors = dict(zip(runs, ("tab:orange", "tab:blue", "gray"), strict=True))
  for name, seeds in runs.items():
    for i, run in enumerate(seeds):
      style = {"color": colors[name], "linewidth": 1}
      top.plot(run.rewards, label=None if i else name, **style)
      bottom.plot(run.kl, **style)
  top.set_title("Learning to count by GRPO: three precisions, each seed a line")
  top.set(ylabel="reward (share of right digits)")
  top.legend()
  bottom.set(xlabel="step", ylabel="KL of sampler and trainer (nats a digit)")
  bottom.set_yscale("log")
  for axes in (top, bottom):
    axes.grid(alpha=0.3)
  return figure


def parse_args():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--steps", type=int, default=100, help="how long to train (%(default)s)"
  )
  parser.add_argument(
    "--seeds", type=int, default=3, help="how many runs of each (%(default)s)"
  )
  parser.add_argument(
    "--devices",
    type=int,
    default=2,
    help="how many devices to make of a CPU (%(default)s)",
  )
  parser.add_argument(
    "--out", default="rl_float16.png", help="the PNG to draw (%(default)s)"
  )
  args = parser.parse_args()
  # Now, rather than when the training is over.
  for name in ("steps", "seeds"):
    if getattr(args, name) < 1:
      parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
  if args.devices not in (1, 2, 4, 8):
    parser.error(f"--devices must be 1, 2, 4 or 8, got {args.devices}")
  if not pathlib.Path(args.out).parent.is_dir():
    parser.error(f"--out must be in a folder that exists, got {args.out}")
  return args


if __name__ == "__main__":
  main()
