"""The devices that a test runs on."""

import jax
import pytest


def require_devices(count):
  """Return devices, or skip the test if there are too few.

  Args:
    count: the number of devices.

  Returns:
    A list of this many devices, all of the platform on which the test runs.
  """
  default = jax.config.jax_default_device
  devices = jax.devices(default and default.platform)
  if len(devices) < count:
    platform = devices[0].platform
    pytest.skip(
      f"needs {count} devices; platform {platform!r} has {len(devices)}"
    )
  return devices[:count]
