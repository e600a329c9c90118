"""A million steps, and runs that are killed at any moment and restarted.

This file is a script, too, which trains with a checkpoint every few steps, and
continues from the latest, if there is any: ``python test_long_runs.py FOLDER``.
It writes the last state to FOLDER/final.npy.
"""

import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

POLICIES = {
  "fixed": ols.FixedLossScale(2.0**10),
  "dynamic": ols.DynamicLossScale(growth_interval=50),
  "hysteresis": ols.DynamicLossScale(growth_interval=50, hysteresis=2),
  "headroom": ols.HeadroomLossScale(),
}
STEPS, CHUNKS = 1_000_000, 10
TOP = 2**31 - 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_long_run_keeps_bounds_counts_types_and_memory(policy):
  rng = np.random.default_rng(0)
  tx = ols.with_loss_scaling(optax.sgd(0.0, momentum=0.5), policy)

  @jax.jit
  def run(state, grads):
    def step(state, grad):
      _, state = tx.update({"w": jnp.full(3, grad)}, state)
      return state, state.loss_scale_state.loss_scale

    return jax.lax.scan(step, state, grads)

  state = tx.init({"w": jnp.zeros(3)})
  # It will saturate, except for the fixed scale.
  start = 0 if isinstance(policy, ols.FixedLossScale) else TOP - 10
  scale_state = state.loss_scale_state
  scale_state = scale_state._replace(total_notfinite=jnp.int32(start))
  state = state._replace(loss_scale_state=scale_state)
  types = jax.tree.map(jax.typeof, state)
  skips, resident = 0, []
  for _ in range(CHUNKS):
    overflow = rng.random(STEPS // CHUNKS) < 1 / 200
    grads = np.exp2(rng.normal(-10, 2, STEPS // CHUNKS)).astype(np.float32)
    state, scales = run(state, np.where(overflow, np.float32(np.inf), grads))
    skips += overflow.sum()
    assert scales.min() >= getattr(policy, "min_scale", 2.0**10)
    assert scales.max() <= getattr(policy, "max_scale", 2.0**10)
    assert jax.tree.map(jax.typeof, state) == types
    resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
  assert abs(skips - STEPS / 200) < 500
  scale_state = state.loss_scale_state
  assert scale_state.total_notfinite == min(start + skips, TOP)
  if start == 0:
    assert scale_state.finite_count == np.argmax(overflow[::-1])
  assert ols.all_finite(state)
  assert resident[-1] - resident[1] < 32 * 1024  # KiB


# Killed and restarted.

KILLED_STEPS, EVERY = 300, 7
OVERFLOWS = {3, 50, 51, 52, 140, 233}


def train(folder):
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
    for number in range(0 if start is None else start, KILLED_STEPS):
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


def start_worker(folder):
  """A worker that has begun to train."""
  worker = subprocess.Popen(
    [sys.executable, __file__, folder],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert worker.stdout.readline() == "training\n", worker.stderr.read()
  return worker


def finish_worker(folder):
  worker = start_worker(folder)
  _, errors = worker.communicate(timeout=120)
  assert worker.returncode == 0, errors
  return np.load(folder / "final.npy")


@pytest.mark.parametrize(
  "kills", [2, pytest.param(50, marks=pytest.mark.nightly)]
)
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(kills, tmp_path):
  (tmp_path / "whole").mkdir()
  (tmp_path / "killed").mkdir()
  expected = finish_worker(tmp_path / "whole")
  rng = random.Random(kills)
  killed = 0
  while killed < kills:
    worker = start_worker(tmp_path / "killed")
    time.sleep(rng.uniform(0.05, 0.6))
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    if worker.returncode != -signal.SIGKILL:
      # It came to its end before: the rest of the kills find a fresh run.
      got = np.load(tmp_path / "killed" / "final.npy")
      assert got.tobytes() == expected.tobytes()
      shutil.rmtree(tmp_path / "killed")
      (tmp_path / "killed").mkdir()
      continue
    killed += 1
  assert finish_worker(tmp_path / "killed").tobytes() == expected.tobytes()


if __name__ == "__main__":
  train(pathlib.Path(sys.argv[1]))
