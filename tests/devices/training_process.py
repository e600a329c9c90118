"""One process of several, for the tests that start them.

``python training_process.py '{"port": ..., "process_id": ..., ...}'``, with
`tests` in PYTHONPATH, trains the exact problem on eight devices that all
processes have together, and writes what this process holds in the end to
``<folder>/<process_id>.npz``.
"""

import json
import os
from pathlib import Path
import signal
import sys

from helpers import exact_model, sharded_reports, sharding
from helpers.sharded_runs import ShardedRun, ShardMapRun
import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols

N_DEVICES = 8


def main(config):
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  n_local = N_DEVICES // config["processes"]
  jax.config.update("jax_num_cpu_devices", n_local)
  jax.distributed.initialize(
    f"127.0.0.1:{config['port']}",
    num_processes=config["processes"],
    process_id=config["process_id"],
    initialization_timeout=240,
    heartbeat_timeout_seconds=config["heartbeat_timeout"],
  )
  assert jax.device_count() == N_DEVICES
  assert jax.local_device_count() == n_local
  modes = {
    "train": train,
    "train_and_save": train_and_save,
    "report": write_reports,
  }
  trees = modes[config["mode"]](config)
  path = Path(config["folder"]) / f"{config['process_id']}.npz"
  np.savez(path, **flatten(trees))


def train(config):
  """All steps in one program, under sharded jit and under shard_map."""
  assert_remote_members_raise()
  batches, _ = exact_model.make_batches(config["steps"])
  return {
    "jit": ShardedRun("fsdp", AxisType.Auto).train(batches),
    "shard_map": ShardMapRun("two axes, sharded", False).train(batches),
  }


def assert_remote_members_raise():
  """Check a mapped state of which each device has one member."""
  state = jax.vmap(lambda _: ols.DynamicLossScale().init())(np.ones(N_DEVICES))
  state = jax.tree.map(np.asarray, state)
  state = state._replace(notfinite_count=np.arange(N_DEVICES, dtype=np.int32))
  mesh = sharding.make_mesh((N_DEVICES,), ("members",))
  shardings = jax.tree.map(lambda _: NamedSharding(mesh, P("members")), state)
  state = {"opt": sharding.put_on_devices(state, shardings)}
  with pytest.raises(ValueError, match="process_allgather"):
    ols.raise_if_stuck(state, max_consecutive_skips=N_DEVICES - 1)
  whole = multihost_utils.process_allgather(
    ols.get_loss_scale_state(state), tiled=True
  )
  message = f"The last {N_DEVICES - 1} steps"
  with pytest.raises(ols.LossScaleError, match=message):
    ols.raise_if_stuck(whole, max_consecutive_skips=N_DEVICES - 1)


def train_and_save(config):
  """Step by step, with a checkpoint to start from and one to write."""
  import orbax.checkpoint as ocp

  run = ShardedRun("fsdp", AxisType.Auto)
  batches, _ = exact_model.make_batches(config["steps"])
  checkpoint = Path(config["folder"]) / "checkpoint"
  saver = ocp.StandardCheckpointer()
  with jax.set_mesh(run.mesh):
    first, carry = 0, run.start()
    if checkpoint.exists():
      first, carry = config["save_after"], saver.restore(checkpoint, carry)
    step = jax.jit(run.step, donate_argnums=(0, 1))
    for i in range(first, config["steps"]):
      if i == config["die_before"] and config["process_id"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
      batch = {name: x[i] for name, x in batches.items()}
      carry = jax.block_until_ready(step(*carry, run.put(batch)))
      print(f"step {i}", flush=True)
      if first == 0 and i + 1 == config["save_after"]:
        saver.save(checkpoint, carry)
        saver.wait_until_finished()
  return {"end": (*carry, ols.get_loss_scale_state(carry).loss_scale)}


def write_reports(config):
  """Write the texts of all reports to ``<folder>/<process_id>.json``."""
  prepare = sharded_reports.prepare_report
  reports = {name: prepare(name)() for name in config["cases"]}
  path = Path(config["folder"]) / f"{config['process_id']}.json"
  path.write_text(json.dumps(reports))
  return {}


def flatten(tree):
  """Each leaf's parts by where they are; replicas in a process are equal."""
  sharding.assert_replicas_equal(tree)
  return {
    json.dumps([jax.tree_util.keystr(path), _slices(shard)]): shard.data
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    for shard in leaf.addressable_shards
  }


def _slices(shard):
  return [[index.start, index.stop] for index in shard.index]


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
