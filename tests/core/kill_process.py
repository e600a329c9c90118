"""Trains with a checkpoint every few steps; goes on from the latest, if any.

Usage: python kill_process.py FOLDER. Writes the last state to FOLDER/final.npy.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_lossscale as ols

STEPS, EVERY = 300, 7
OVERFLOWS = {3, 50, 51, 52, 140, 233}


def main(folder):
  tx = ols.with_loss_scaling(
    optax.adam(1e-2), ols.DynamicLossScale(16.0, growth_interval=20)
  )

  def loss_fn(params, x):
    hidden = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
    return jnp.mean(jnp.square(hidden.astype(jnp.float32) - 0.5))

  @jax.jit
  def train_step(params, opt_state, number):
    x = jax.random.normal(jax.random.key(number), (4, 8))
    overflow = jnp.isin(number, jnp.array(sorted(OVERFLOWS)))
    x = jnp.where(overflow, jnp.inf, x)
    grads = ols.grad(loss_fn, opt_state)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = {"w": jax.random.normal(jax.random.key(0), (8, 3))}
  tree = {"params": params, "opt_state": tx.init(params)}
  with ocp.CheckpointManager(
    folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
  ) as manager:
    start = manager.latest_step()
    if start is not None:
      tree = manager.restore(start, args=ocp.args.StandardRestore(tree))
    print("training", flush=True)
    for number in range(0 if start is None else start, STEPS):
      params, opt_state = train_step(tree["params"], tree["opt_state"], number)
      tree = {"params": params, "opt_state": opt_state}
      if (number + 1) % EVERY == 0:
        manager.save(number + 1, args=ocp.args.StandardSave(tree))
      time.sleep(0.002)  # so that a signal finds it training, not done
    manager.wait_until_finished()
  leaves = [np.ravel(x) for x in jax.tree.leaves(tree)]
  np.save(folder / "final.npy", np.concatenate(leaves, dtype=np.float64))
  state = ols.get_loss_scale_state(tree)
  assert state.total_notfinite == len(OVERFLOWS), state


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
