"""Each example runs for a few steps, as its users run it."""

from helpers import examples
import pytest

pytestmark = pytest.mark.slow

# What each says last; examples with tests of their own are not here.
LAST_LINES = {
  "equinox_mlp": "loss scale 32768, skipped 0",
  "flax_linen": "statistics finite: True",
  "first_hour": "float16: loss scale 32768, skipped 0 of 4",
  "gan": "critic: loss scale ",
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs(name, tmp_path):
  lines, progress = examples.run(name, "--steps", "4", folder=tmp_path)
  assert lines[-1].startswith(LAST_LINES[name])
  assert "4/4" in progress
