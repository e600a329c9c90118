"""The device by JAX, and a copy in its memory."""

import jax
import jax.numpy as jnp

from on_gpu import events
from on_gpu.versions import version

PACKAGES = ("jax", "jaxlib", "optax", "flax", "jmp", "numpy")


def is_ready(size_name: str) -> bool:
  """Report versions and device; return whether it can measure at this size."""
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  versions = {name: version(name) for name in PACKAGES}
  events.tell(
    "facts",
    facts={
      "device": device.device_kind,
      "platform": device.platform,
      "platform version": ", ".join(device.client.platform_version.split("\n")),
      "device memory for JAX": stats.get("bytes_limit"),
      **{name: found for name, found in versions.items() if found},
    },
  )
  if device.platform == "cpu" and size_name != "tiny":
    events.line(
      "Left out: JAX finds no GPU. Is JAX for CUDA installed? To try the"
      " benchmark out on a CPU, add --size tiny."
    )
    return False
  return True


class Copy:
  """Reads numbers and writes them back: as fast as an optimizer can be."""

  skips = False

  def __init__(self, numbers: int):
    self.row = {"bytes": 8 * numbers}
    self._x = jnp.ones(numbers, jnp.float32)
    self._add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def prepare(self, skip):
    pass

  def step(self, skip):
    self._x = self._add(self._x)

  def wait(self):
    self._x.block_until_ready()
