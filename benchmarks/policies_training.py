"""The policies on real training, and what probes cost: half an hour on CPU.

Trains examples/digits.py and examples/transformer.py under each policy and from
three scales. Writes its part of policies.json.

  python benchmarks/policies_training.py
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import digits  # noqa: E402
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
  results = json.loads(file.read_text()) if file.exists() else {}
  for name, measure in (
    ("probe_cost", time_probes),
    ("digits", train_digits),
    ("transformer", train_transformer),
  ):
    results[name] = measure()
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(name, json.dumps(results[name], indent=1))


def train_digits():
  """The autoencoder, with three seeds each."""
  runs = {"float32": (jnp.float32, 1.0)}
  runs |= {name: (jnp.float16, policy) for name, policy in RUNS.items()}
  rows = {}
  for name, (dtype, policy) in runs.items():
    found = [
      digits.train(digits.load_data(seed), dtype, policy, seed=seed)
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
    metrics = ols.probe_metrics(jnp.asarray(run.cotangents))
    rows[name] = {
      "test_loss": [run.test_loss],
      "skipped": [int(run.skipped.sum())],
      "log2_last_scale": [float(np.log2(run.scales[-1]))],
      "zero_share": [float(metrics["zero_share"].max())],
    }
  return rows


def time_probes():
  """Whole training steps with and without probes, by turns; milliseconds."""
  text = transformer.load_text()[0]
  params = transformer.init_params(jax.random.key(0))
  slots = ols.probe_slots(transformer.LAYERS)
  batch = transformer.sample_batch(np.random.default_rng(0), text)
  tx = ols.with_loss_scaling(optax.adamw(1e-3), ols.HeadroomLossScale())
  opt_state = tx.init(params)

  @jax.jit
  def with_probes(params, opt_state):
    loss, (grads, cotangents) = ols.value_and_grad(
      transformer.loss_fn, opt_state, argnums=(0, 1)
    )(params, slots, batch)
    return loss, tx.update(grads, opt_state, params, cotangents=cotangents)

  @jax.jit
  def without(params, opt_state):
    loss, grads = ols.value_and_grad(transformer.loss_fn, opt_state)(
      params, slots, batch
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


if __name__ == "__main__":
  main()
