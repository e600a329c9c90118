"""Each example runs for a few steps, as its users run it."""

import os
import pathlib
import subprocess
import sys

from helpers import ROOT
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.slow

# What each says last; examples with tests of their own are not here.
LAST_LINES = {
  "equinox_mlp": "loss scale 32768, skipped 0",
  "flax_linen": "statistics finite: True",
  "first_hour": "float16: loss scale 32768, skipped 0 of 4",
  "gan": "critic: loss scale ",
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs(name):
  process = subprocess.run(
    [sys.executable, ROOT / "examples" / f"{name}.py", "--steps", "4"],
    env=os.environ
    | {
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(pathlib.Path(ols.__file__).parents[1]),
    },
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stderr
  assert process.stdout.splitlines()[-1].startswith(LAST_LINES[name])
  assert "4/4" in process.stderr  # the progress bar
