"""The platforms, devices and settings that the tests use."""

import os
import re
import subprocess
import sys

from helpers import quick_budget, ROOT
import jax
import jax.numpy as jnp
import numpy as np
import pytest

FLOAT16_SUM = (
  "tests/devices/test_float16.py"
  "::test_a_float16_sum_over_devices_overflows_with_more_devices"
)
ONE_DEVICE = "sum_in_half-1-float16-24576.0"
EIGHT_DEVICES = "mean_in_half-8-float16-24576.0"
# Fails if the precision of matmuls is set from outside.
AUTOCAST = "tests/autocast/test_rewrite.py::test_float64_matmuls_are_unchanged"


@pytest.mark.slow
def test_tests_without_enough_devices_are_skipped_with_a_reason():
  selected = [f"{FLOAT16_SUM}[{x}]" for x in (ONE_DEVICE, EIGHT_DEVICES)]
  out = run(
    *("-m", "pytest", "-rs", "-p", "no:cacheprovider", *selected, AUTOCAST),
    JAX_NUM_CPU_DEVICES="1",
    JAX_DEFAULT_MATMUL_PRECISION="highest",
  )
  assert "2 passed, 1 skipped" in out
  reason = "needs 8 devices; platform 'cpu' has 1"
  assert re.search(rf"SKIPPED \[1\] tests/\S+: {reason}", out)


PLATFORMS = {
  "": "cpu",
  "cpu": "cpu",
  "cuda,cpu": "cpu,cuda",
  "tpu,cuda": "cpu,tpu,cuda",
}


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "platforms"), PLATFORMS.items())
def test_the_cpu_is_the_default_next_to_other_platforms(chosen, platforms):
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
  assert "2 passed" in run_tests(tmp_path, MARKED)


USAGE = quick_budget.Usage(tests=1, programs=8, operations=99, seconds=30.0)


def test_a_quick_test_above_its_budget_is_described():
  assert quick_budget.describe_excess(USAGE, ["step"] * 8) is None
  names = ["step", "run", *["step"] * 7]
  message = quick_budget.describe_excess(USAGE._replace(programs=9), names)
  assert message == (
    "This quick test compiles 9 programs: 8 of step, 1 of run. The budget is 8"
    " programs and 30.0 CPU seconds. Mark it with @pytest.mark.slow, or test"
    " the function that decides on plain data: see tests/README.md."
  )
  message = quick_budget.describe_excess(USAGE._replace(seconds=30.1), [])
  assert message.startswith("This quick test takes 30.1 CPU seconds. The")


@pytest.mark.parametrize(
  ("compute", "programs", "operations"),
  [
    (lambda x: jnp.add(x, x), 0, 1),
    (lambda x: jnp.where(x, x, x), 0, 1),
    (jax.jit(lambda x: x + x), 1, 0),
    (lambda x: jax.lax.map(jnp.sin, x), 1, 0),
  ],
)
def test_what_runs_outside_of_jit_counts_as_an_operation(
  compute, programs, operations, monkeypatch
):
  compiled = []
  monkeypatch.setattr(quick_budget, "_compiled", compiled)
  compute(np.ones((3, 1, 4, 1, 5), bool))  # No other test has this shape.
  is_operation = list(map(quick_budget.is_operation, compiled))
  assert sorted(is_operation) == [False] * programs + [True] * operations


BUDGET = """
import jax, numpy, pytest
from helpers import quick_budget

def compile_programs(number):
  for i in range(number):
    jax.jit(lambda x: x + i)(numpy.float32(1))

def test_eight():
  compile_programs(8)

def test_nine():
  compile_programs(9)

def test_busy(monkeypatch):
  monkeypatch.setattr(quick_budget, "MAX_CPU_SECONDS", 0)
  sum(range(10**6))

@pytest.mark.slow
def test_slow():
  compile_programs(9)

@pytest.mark.nightly
def test_nightly():
  compile_programs(9)
"""


BUDGET_OF_ALL = "\nquick_budget.MAX_PROGRAMS_OF_ALL = {}\n"
EIGHT = ["--quick-budget", "-k", "eight or slow"]


OVER_ALL = "The budget of all quick tests is 7 programs.*2 passed"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "code", "printed", "status"),
  [
    # Two of the five are not quick.
    ([], "", r"^all +3 +17 +0 .*5 passed", 0),
    (["--quick-budget"], "", "2 failed, 3 passed", 1),
    (["--quick-budget", "-n", "1"], "", "2 failed, 3 passed", 1),
    (EIGHT, BUDGET_OF_ALL.format(8), "2 passed", 0),
    (EIGHT, BUDGET_OF_ALL.format(7), OVER_ALL, 1),
  ],
)
def test_with_the_option_quick_tests_above_their_budget_fail(
  options, code, printed, status, tmp_path
):
  options = "-m", "slow or not slow", *options
  out = run_tests(tmp_path, BUDGET + code, *options, status=status)
  assert re.search(printed, out, re.MULTILINE | re.DOTALL)


def run_tests(folder, code, *options, **kwargs):
  """Run pytest with the settings of the tests on a file of this code."""
  path = folder / "test_code.py"
  path.write_text(code)
  plugins = "-p", "conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"
  return run("-m", "pytest", *plugins, *options, path, **kwargs)


def run(*args, status=0, **environment):
  kept = {name: x for name, x in os.environ.items() if name[:4] != "JAX_"}
  paths = [str(ROOT), str(ROOT / "tests")]
  done = subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=kept | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == status, done.stdout + done.stderr
  return done.stdout
