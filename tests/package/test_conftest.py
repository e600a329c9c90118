"""The platforms, devices and settings that the tests use."""

import os
import re
import subprocess
import sys

from helpers import ROOT
import pytest

FLOAT16_SUM = (
  "tests/devices/test_float16.py"
  "::test_a_float16_sum_over_devices_overflows_with_more_devices"
)
# Fails if the precision of matmuls is set from outside.
AUTOCAST = "tests/autocast/test_rewrite.py::test_float64_matmuls_are_unchanged"


@pytest.mark.slow
def test_tests_without_enough_devices_are_skipped_with_a_reason():
  selected = f"{FLOAT16_SUM}[1-False]", f"{FLOAT16_SUM}[8-True]", AUTOCAST
  out = run(
    *("-m", "pytest", "-rs", "-p", "no:cacheprovider", *selected),
    JAX_NUM_CPU_DEVICES="1",
    JAX_DEFAULT_MATMUL_PRECISION="highest",
  )
  assert "2 passed, 1 skipped" in out
  reason = "needs 8 devices; platform 'cpu' has 1"
  assert re.search(rf"SKIPPED \[1\] tests/\S+: {reason}", out)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("chosen", "platforms"),
  [
    ("", "cpu"),
    ("cpu", "cpu"),
    ("cuda", "cpu,cuda"),
    ("cuda,cpu", "cpu,cuda"),
    ("tpu,cuda", "cpu,tpu,cuda"),
  ],
)
def test_the_cpu_is_the_default_platform_next_to_those_of_the_user(
  chosen, platforms
):
  code = """
import conftest, jax, os
assert jax.config.jax_platforms == os.environ["JAX_PLATFORMS"]
print(jax.config.jax_platforms, jax.config.jax_num_cpu_devices)
"""
  assert run("-c", code, JAX_PLATFORMS=chosen).split() == [platforms, "8"]


MARKED = """
import conftest, jax, pytest
from helpers import sharding

conftest.ACCELERATORS[:] = ["cpu"]  # There may be no other.

@pytest.mark.accelerator
def test_marked():
  device = jax.devices("cpu")[0]
  assert jax.config.jax_default_device == device
  assert list(sharding.make_mesh((1,), ("x",)).devices) == [device]

def test_unmarked():
  assert jax.config.jax_default_device is None
"""


@pytest.mark.slow
def test_marked_tests_run_on_the_accelerator_and_no_others(tmp_path):
  path = tmp_path / "test_marked.py"
  path.write_text(MARKED)
  options = "-p", "conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"
  assert "2 passed" in run("-m", "pytest", *options, str(path))


def run(*args, **environment):
  """Run Python in the root of the repository, and return what it prints."""
  kept = {name: x for name, x in os.environ.items() if name[:4] != "JAX_"}
  paths = [str(ROOT), str(ROOT / "tests")]
  done = subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=kept | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout
