"""Several real processes on one machine, each with its part of the devices."""

import json
import os
from pathlib import Path
import socket
import subprocess
import sys
import time

from helpers import exact_model, ROOT, sharded_reports
import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("training_process.py")
EXAMPLE = ROOT / "examples" / "multihost.py"
STEPS = 50
# Far more than is needed, for machines with more to do than processors.
TIMEOUT = 300
# JAX's own is 100 seconds; a process waits this long for one that died.
HEARTBEAT_TIMEOUT = 15


@pytest.mark.parametrize(
  "n_processes", [pytest.param(2, marks=pytest.mark.nightly), 4]
)
def test_all_processes_skip_a_step_that_overflows_on_one(tmp_path, n_processes):
  """Each overflow is in one example, which one process alone has."""
  config = {"mode": "train", "steps": STEPS}
  with Processes(n_processes, tmp_path, config) as processes:
    processes.wait_for_success()
  expected = exact_model.train_on_one_device(STEPS)
  assert expected[1].loss_scale_state.total_notfinite > 5
  for mode in ("jit", "shard_map"):
    assert_equal(tmp_path, n_processes, {mode: expected})


@pytest.mark.parametrize(
  "cases",
  [
    ["sound", "overflow in shard_map", "overflow in NNX", "sound in pmap"],
    pytest.param([*sharded_reports.CASES], marks=pytest.mark.nightly),
  ],
  ids=["a few", "all"],
)
def test_reports_are_the_same_on_all_processes(cases, tmp_path):
  """The last process alone has the row that overflows."""
  config = {"mode": "report", "cases": cases}
  with Processes(2, tmp_path, config) as processes:
    processes.wait_for_success()
  reports, others = (
    json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)
  )
  assert reports == others
  assert [*reports] == cases
  for name in cases:
    assert sharded_reports.CASES[name].text in reports[name]


@pytest.mark.nightly
def test_a_killed_process_does_not_block_the_rest_and_a_restart_continues(
  tmp_path,
):
  steps = 8
  config = {"mode": "train_and_save", "steps": steps, "save_after": 4}
  death = {"die_before": 6, "heartbeat_timeout": HEARTBEAT_TIMEOUT}
  with Processes(2, tmp_path, config | death) as processes:
    assert processes.wait(1) < 0, processes.logs()
    died = time.monotonic()
    # JAX ends the other process: by the broken connection or the heartbeat.
    assert processes.wait(0) != 0, processes.logs()
    assert time.monotonic() - died < HEARTBEAT_TIMEOUT + 60
    assert "step 5" in processes.logs() and "step 6" not in processes.logs()
  with Processes(2, tmp_path, config | {"die_before": None}) as processes:
    processes.wait_for_success()
    assert "step 4" in processes.logs() and "step 3" not in processes.logs()
  expected = exact_model.train_on_one_device(steps)
  scale_state = expected[1].loss_scale_state
  assert scale_state.total_notfinite > 0
  end = (*expected[:2], scale_state.loss_scale)
  assert_equal(tmp_path, 2, {"end": end})


def test_the_multihost_example_trains_on_two_processes():
  done = subprocess.run(
    [sys.executable, EXAMPLE, "--processes", "2", "--steps", "3"],
    capture_output=True,
    check=False,
    env=make_environment(),
    text=True,
    timeout=TIMEOUT,
  )
  assert done.returncode == 0, done.stderr
  assert "3/3" in done.stderr  # the progress bar, of one process
  assert done.stdout.count("2 processes, 2 devices: test MSE 0.") == 1


class Processes:
  """Start workers with a separate JAX cluster on loopback."""

  def __init__(self, n_processes, folder, config):
    self.folder = folder
    config = {
      "processes": n_processes,
      "folder": str(folder),
      "port": find_free_port(),
      "heartbeat_timeout": 100,
      **config,
    }
    self.processes = [
      self.start(config | {"process_id": i}) for i in range(n_processes)
    ]

  def start(self, config):
    # A file, since a full pipe would stop the process.
    with open(self.log_file(config["process_id"]), "w") as log:
      return subprocess.Popen(
        [sys.executable, str(WORKER), json.dumps(config)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=make_environment(),
      )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()

  def wait(self, process_id):
    try:
      return self.processes[process_id].wait(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
      pytest.fail(f"Process {process_id} hangs.\n{self.logs()}")

  def wait_for_success(self):
    for i in range(len(self.processes)):
      assert self.wait(i) == 0, self.logs()

  def log_file(self, process_id):
    return self.folder / f"{process_id}.log"

  def logs(self):
    return "\n".join(
      f"process {i}:\n{self.log_file(i).read_text()}"
      for i in range(len(self.processes))
    )


def make_environment():
  old = filter(None, [os.environ.get("PYTHONPATH")])
  path = [str(ROOT), str(ROOT / "tests"), *old]
  return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def find_free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def assert_equal(folder, n_processes, expected):
  """All that the processes hold equals the leaves' parts, bit for bit."""
  leaves = {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected)
  }
  covered = dict.fromkeys(leaves, 0)
  for i in range(n_processes):
    with np.load(folder / f"{i}.npz") as parts:
      for key, part in parts.items():
        name, slices = json.loads(key)
        if name not in leaves:
          continue
        whole = leaves[name][tuple(slice(*pair) for pair in slices)]
        assert part.tobytes() == whole.tobytes(), f"process {i}: {key}"
        assert part.dtype == whole.dtype
        covered[name] += part.size
  for name, size in covered.items():
    assert size >= leaves[name].size, name
