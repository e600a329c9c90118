"""The policies on real training, and the cost of probes: half an hour on CPU.

Trains examples/digits.py and examples/transformer.py under each policy and from
three scales, the two tasks of sparse_training.py, and that of rare_training.py.
Writes its part of policies.json, policies_hinge.png and policies_masked.png.

  python benchmarks/policies/policies_training.py               # all
  python benchmarks/policies/policies_training.py hinge masked  # two minutes
  python benchmarks/policies/policies_training.py "2 of 100" "1 of 300"
"""

import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import rare_training
import sparse_training

import optax_lossscale as ols

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import digits  # noqa: E402
import policies  # noqa: E402
import transformer  # noqa: E402

SEEDS = 3  # of the digits
STEPS = 400  # of the transformer
REPEATS = 30  # of a timing

RUNS = {
  "no scaling": ols.FixedLossScale(1.0),
  **{
    f"{name} from 2**{k}": cls(init_scale=2.0**k)
    for name, cls in (
      ("dynamic", ols.DynamicLossScale),
      ("headroom", ols.HeadroomLossScale),
    )
    for k in (0, 15, 60)
  },
}


def main():
  file = HERE / "policies.json"
  for name in sys.argv[1:] or MEASURES:
    found = MEASURES[name]()
    results = json.loads(file.read_text()) if file.exists() else {}
    results[name] = found
    file.write_text(json.dumps(results, indent=1) + "\n")
    if name == "probe_cost":
      print(name, found)
    else:
      policies.print_table(name.capitalize(), found)


def train_digits():
  """The autoencoder, with three seeds each."""
  runs = {"float32": (digits.in_float32, 1.0)}
  runs |= {name: (digits.by_hand, policy) for name, policy in RUNS.items()}
  rows = {}
  for name, (cast, policy) in runs.items():
    found = [
      digits.train(digits.load_data(seed), cast, policy, seed=seed)
      for seed in range(SEEDS)
    ]
    rows[name] = {
      "test_loss": [run.test_loss for run in found],
      "skipped": [int(run.loss_scale_state.total_notfinite) for run in found],
      "log2_last_scale": [float(np.log2(run.scales[-1])) for run in found],
    }
  return rows


def train_transformer():
  """The transformer, once each; the same letters and the same start for all."""
  text = transformer.load_text()
  rows = {}
  for name, policy in RUNS.items():
    run = transformer.train(text, policy, STEPS)
    metrics = ols.diagnostics.probe_metrics(jnp.asarray(run.counts))
    rows[name] = {
      "test_loss": [run.test_loss],
      "skipped": [int(run.skipped.sum())],
      "log2_last_scale": [float(np.log2(run.scales[-1]))],
      "zero_share": [float(metrics["zero_fraction"].max())],
    }
  return rows


def train_sparse(name):
  """A task whose batches mostly have gradients of exactly zero."""
  runs = sparse_training.train_all(sparse_training.TASKS[name]())
  draw_sparse(name, runs)
  return sparse_training.summarize(runs)


def draw_sparse(name, runs):
  """The scale of the first seed over the steps, and the steps it lost."""
  figure = Figure(figsize=(8, 3.5), layout="constrained")
  axes = figure.subplots()
  for policy, color in (("dynamic", "tab:orange"), ("headroom", "tab:blue")):
    run = runs[policy]
    log2_scales = np.log2(run.scales[0])
    (lost,) = np.nonzero(run.informative[0] & ~run.finite[0])
    label = f"{policy}: {lost.size} of {run.informative[0].sum()} lost"
    axes.plot(log2_scales, color=color, lw=1, label=label)
    axes.plot(lost, log2_scales[lost], "x", color=color)
  axes.set(xlabel="step", ylabel="log2 of the loss scale", title=name)
  axes.legend()
  axes.grid(alpha=0.3)
  figure.savefig(HERE / f"policies_{name}.png", dpi=100)


def time_probes():
  """Whole training steps with and without probes, by turns; milliseconds."""
  text = transformer.load_text()[0]
  params = transformer.init_params(jax.random.key(0))
  counters = ols.diagnostics.probe_counters(transformer.LAYERS)
  batch = transformer.sample_batch(np.random.default_rng(0), text)
  tx = ols.with_loss_scaling(optax.adamw(1e-3), ols.HeadroomLossScale())
  opt_state = tx.init(params)

  @jax.jit
  def with_probes(params, opt_state):
    loss, (grads, counts) = ols.value_and_grad(
      transformer.loss_fn, opt_state, argnums=(0, 1)
    )(params, counters, batch)
    evidence = ols.diagnostics.probe_update_kwargs(counts, opt_state)
    return loss, tx.update(grads, opt_state, params, **evidence)

  @jax.jit
  def without(params, opt_state):
    loss, grads = ols.value_and_grad(transformer.loss_fn, opt_state)(
      params, counters, batch
    )
    return loss, tx.update(grads, opt_state, params)

  times = {"with_probes": [], "without": []}
  for repeat in range(REPEATS + 1):
    for step, found in zip((with_probes, without), times.values(), strict=True):
      start = time.perf_counter()
      jax.block_until_ready(step(params, opt_state))
      if repeat:  # The first one compiles.
        found.append(1000 * (time.perf_counter() - start))
  quartiles = {
    name: np.percentile(found, [25, 50, 75]).round(2).tolist()
    for name, found in times.items()
  }
  ratios = np.divide(times["with_probes"], times["without"])
  return quartiles | {
    "ratio": np.percentile(ratios, [25, 50, 75]).round(4).tolist()
  }


MEASURES = {
  **{
    f"{mixture.length} of {mixture.period}": functools.partial(
      rare_training.train_all, mixture
    )
    for mixture in rare_training.MIXTURES
  },
  "hinge": lambda: train_sparse("hinge"),
  "masked": lambda: train_sparse("masked"),
  "digits": train_digits,
  "transformer": train_transformer,
  "probe_cost": time_probes,
}

if __name__ == "__main__":
  main()
