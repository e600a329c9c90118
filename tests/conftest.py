"""Settings that all tests share."""

import os
import pathlib
import sys

# What XLA compiled for one test, worker or run is loaded by the next. Set
# before JAX is imported, for the processes that tests start as well.
CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# For them, too: none is to look for a TPU where only its compiler is installed.
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Eight virtual devices, whatever the machine has; tests of one device are not
# touched by the other seven.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile(
  "quick", deadline=None, derandomize=True, max_examples=100
)
hypothesis.settings.register_profile(
  "ci", deadline=None, derandomize=True, max_examples=1_000
)
# A mutant is done with its first failure: none is made smaller.
hypothesis.settings.register_profile(
  "mutants",
  hypothesis.settings.get_profile("ci"),
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.register_profile(
  "nightly", deadline=None, max_examples=10_000, print_blob=True
)
hypothesis.settings.load_profile("quick")


@pytest.fixture(autouse=True)
def forget_the_calls_outside_of_jit():
  """They are counted by the code, which tests may share: `_messages.py`."""
  messages = sys.modules.get("optax_lossscale._autocast._messages")
  if messages is not None:
    messages._call_counts.clear()
