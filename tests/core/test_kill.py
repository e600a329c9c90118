"""Killed at any moment and restarted, training ends as if nothing had been."""

import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("kill_process.py")


def start(folder):
  """A worker that has begun to train."""
  worker = subprocess.Popen(
    [sys.executable, WORKER, folder],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert worker.stdout.readline() == "training\n", worker.stderr.read()
  return worker


def finish(folder):
  worker = start(folder)
  _, errors = worker.communicate(timeout=120)
  assert worker.returncode == 0, errors
  return np.load(folder / "final.npy")


@pytest.mark.parametrize(
  "kills", [2, pytest.param(50, marks=pytest.mark.nightly)]
)
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(kills, tmp_path):
  (tmp_path / "whole").mkdir()
  (tmp_path / "killed").mkdir()
  expected = finish(tmp_path / "whole")
  rng = random.Random(kills)
  killed = 0
  while killed < kills:
    worker = start(tmp_path / "killed")
    time.sleep(rng.uniform(0.05, 0.6))
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    if worker.returncode != -signal.SIGKILL:
      # It came to its end before: the rest of the kills find a fresh run.
      got = np.load(tmp_path / "killed" / "final.npy")
      assert got.tobytes() == expected.tobytes()
      subprocess.run(["rm", "-r", tmp_path / "killed"], check=True)
      (tmp_path / "killed").mkdir()
      continue
    killed += 1
  assert finish(tmp_path / "killed").tobytes() == expected.tobytes()
