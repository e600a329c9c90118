"""Stores what the policies remember, as this version writes it.

Run it for a release, and commit the file: test_stored_states.py reads that of
each version with the package of the day.

  python tests/core/stored/record.py
"""

import base64
import json
import pathlib
import pickle

from flax import serialization
import jax
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale import interop

# Each class, and each structure of what it remembers: test_stored_states.py
# reports if one is missing.
POLICIES = {
  "fixed": ols.FixedLossScale(2.0**10),
  "dynamic": ols.DynamicLossScale(),
  "dynamic, hysteresis": ols.DynamicLossScale(hysteresis=3),
  "headroom": ols.HeadroomLossScale(),
  "deepspeed": interop.DeepSpeedLossScale(2.0**16, 1000, 1.0, 2),
  "fairseq": interop.FairseqLossScale(1000),
}
# The gradient of each step.
GRADS = 2.0**-10, 2.0**-9, float("nan"), 0.0, 2.0**-11


def make(policy):
  """The optimizer, and the parameters and its state after some steps."""
  tx = ols.with_loss_scaling(optax.sgd(0.5, momentum=0.5), policy)
  params = {"w": np.arange(3, dtype=np.float32)}
  state = tx.init(params)
  for grad in GRADS:
    grads = {"w": np.full(3, grad, np.float32)}
    updates, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
  return tx, jax.tree.map(np.asarray, (params, state))


def main():
  folder = pathlib.Path(__file__).parent
  states = {name: make(policy)[1] for name, policy in POLICIES.items()}
  written = {
    "pickle": pickle.dumps(states, protocol=4),
    "msgpack": serialization.to_bytes(states),
  }
  as_text = {k: base64.b64encode(x).decode() for k, x in written.items()}
  file = folder / f"{ols.__version__}.json"
  file.write_text(json.dumps(as_text, indent=1) + "\n")


if __name__ == "__main__":
  main()
