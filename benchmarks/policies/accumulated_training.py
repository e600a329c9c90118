"""A loss that is a sum, whose gradient is divided at the end: some minutes.

Trains examples/transformer.py as MaxText does when it accumulates: the loss is
summed over the letters of each of four micro-batches, the gradients are added,
and divided by the number of all letters. So the cotangents in the backward pass
are 1,024 times as large as the gradients that `update` receives. Writes its
part of policies.json.

  python benchmarks/policies/accumulated_training.py
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import policies

import optax_lossscale as ols

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import transformer  # noqa: E402

STEPS, MICRO_BATCHES = 400, 4
RUNS = {
  "float32": (jnp.float32, ols.FixedLossScale(1.0)),
  "dynamic": (jnp.float16, ols.DynamicLossScale()),
  "dynamic, min_scale=2**-14": (
    jnp.float16,
    ols.DynamicLossScale(min_scale=2.0**-14),
  ),
  "headroom": (jnp.float16, ols.HeadroomLossScale()),
}


def main():
  text = transformer.load_text()
  rows = {name: train(text, *run) for name, run in RUNS.items()}
  file = HERE / "policies.json"
  results = json.loads(file.read_text())
  results["accumulated"] = rows
  file.write_text(json.dumps(results, indent=1) + "\n")
  policies.print_table("Accumulated", rows)


def train(text, dtype, policy):
  """The skipped steps, the loss and the scale of a run."""
  params = transformer.init_params(jax.random.key(0))
  counters = ols.diagnostics.probe_counters(transformer.LAYERS)
  tx = ols.with_loss_scaling(
    optax.adamw(transformer.LEARNING_RATE), policy, max_norm=1.0
  )
  opt_state = tx.init(params)
  letters = transformer.BATCH_SIZE * transformer.CONTEXT

  def loss_fn(params, batch):
    mean = ols.autocast(transformer.loss_fn, dtype)(params, counters, batch)
    return mean * (letters / MICRO_BATCHES)  # the sum of a micro-batch

  @jax.jit
  def step(params, opt_state, batch):
    def add(total, micro_batch):
      grads = ols.grad(loss_fn, opt_state)(params, micro_batch)
      return optax.tree.add(total, grads), None

    micro_batches = batch.reshape(MICRO_BATCHES, -1, batch.shape[-1])
    grads, _ = jax.lax.scan(add, optax.tree.zeros_like(params), micro_batches)
    grads = optax.tree.scale(1 / letters, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  rng, skipped = np.random.default_rng(0), []
  for _ in range(STEPS):
    batch = transformer.sample_batch(rng, text[0])
    params, opt_state = step(params, opt_state, batch)
    skipped.append(~ols.get_loss_scale_state(opt_state).last_finite)
  rng = np.random.default_rng(0)
  test = [transformer.sample_batch(rng, text[1]) for _ in range(20)]
  loss = np.mean([jax.jit(loss_fn)(params, x) for x in test])
  scale = ols.get_loss_scale_state(opt_state).loss_scale
  return {
    "skipped_of_40": [int(np.sum(skipped[:40]))],
    f"of_{STEPS}": [int(np.sum(skipped))],
    "test_loss": [float(loss * MICRO_BATCHES / letters)],
    "log2_last_scale": [float(np.log2(scale))],
  }


if __name__ == "__main__":
  main()
