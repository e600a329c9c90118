"""Settings that all tests share."""

import dataclasses
import functools
import os
import pathlib

# What XLA compiled for one test, worker or run is loaded by the next. Set
# before JAX is imported, for the processes that tests start as well.
CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# The CPU is the default platform, whose values the tests expect. Platforms that
# JAX_PLATFORMS names are there for the tests that are marked `accelerator`. By
# default there is none: JAX would look for a TPU if only its compiler is
# installed.
ACCELERATORS = [
  name
  for name in os.environ.get("JAX_PLATFORMS", "").split(",")
  if name not in ("", "cpu")
]
os.environ["JAX_PLATFORMS"] = ",".join(["cpu", *ACCELERATORS])
# Several workers share the memory of a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A test that depends on the precision of matmuls sets it.
os.environ.pop("JAX_DEFAULT_MATMUL_PRECISION", None)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# A pytest plugin may have imported JAX before.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_default_matmul_precision", None)
# Eight virtual devices, whatever the machine has; tests of one device are not
# touched by the other seven.
if "JAX_NUM_CPU_DEVICES" not in os.environ:
  jax.config.update("jax_num_cpu_devices", 8)

pytest_plugins = ["helpers.quick_budget"]

hypothesis.settings.register_profile(
  "quick", deadline=None, derandomize=True, max_examples=100
)
hypothesis.settings.register_profile(
  "ci", deadline=None, derandomize=True, max_examples=300
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


def pytest_make_parametrize_id(val):
  """Name a row by its values: `[1,2]-mode=eval` in place of `new0-options0`."""
  if isinstance(val, (jax.Array, np.generic, np.ndarray)):
    return f"{val.dtype}{list(val.shape)}".replace(" ", "")
  if isinstance(val, range):
    return f"{val.start}..{val.stop}"
  if isinstance(val, functools.partial):
    return val.func.__name__
  if dataclasses.is_dataclass(val) and not isinstance(val, type):
    return type(val).__name__
  if not isinstance(val, (dict, list, tuple)):
    return None  # The default is readable.
  for name in describe(val), ",".join(map(str, val)):
    if len(name) <= 90 and " " not in name:
      return name
  return None


def describe(val, depth=3):
  """Return a text, which has a space if there is no short one."""
  if isinstance(val, dict) and depth:
    items = (f"{key}={describe(x, depth - 1)}" for key, x in val.items())
    return ",".join(items) or "{}"
  if isinstance(val, (list, tuple)) and depth:
    return f"[{','.join(describe(x, depth - 1) for x in val)}]"
  if isinstance(val, (bool, int, float, str, np.dtype, np.bool_, type(None))):
    return str(val)
  return getattr(val, "__name__", " ")


@pytest.fixture(autouse=True, scope="session")
def measure_only_this_process():
  """Don't let pytest-cov before 7 measure the processes that tests start."""
  for name in [name for name in os.environ if name.startswith("COV_CORE_")]:
    del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def trace_again_for_contexts(request):
  """Let each file run what it traces, if tools/mutants.py measures this."""
  if request.config.getoption("cov_context", None):
    jax.clear_caches()


@pytest.fixture(autouse=True)
def use_accelerator(request):
  """Run a test with the marker `accelerator` on the first one, if any."""
  if ACCELERATORS and request.node.get_closest_marker("accelerator"):
    with jax.default_device(jax.devices(ACCELERATORS[0])[0]):
      yield
  else:
    yield
