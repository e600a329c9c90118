"""The device of a library: what it is, and how fast it copies its memory."""

import importlib.metadata
import importlib.util
import time

from shared import clock

from on_gpu.findings import Findings

PACKAGES = ("jax", "jaxlib", "optax", "flax", "jmp", "numpy")
COPY_SECONDS = 5.0  # at most


def find_version(package: str) -> str | None:
  """Return the version of a package, or None if it is not installed."""
  if importlib.util.find_spec(package) is None:
    return None
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "of unknown version"


def is_ready(library: str, size_name: str, findings: Findings) -> bool:
  """Report versions and device; return whether it can measure at this size."""
  platform, facts = {"jax": _describe_jax, "torch": _describe_torch}[library]()
  findings.add_facts(facts)
  if platform == "cpu" and size_name != "tiny":
    findings.add_line(
      f"Left out: {library} finds no GPU. Is {library} for CUDA installed? To"
      " try the benchmark out on a CPU, add --size tiny."
    )
    return False
  return True


def _describe_jax():
  import jax

  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  return device.platform, {
    "device": device.device_kind,
    "platform": device.platform,
    "platform version": ", ".join(device.client.platform_version.split("\n")),
    "device memory for JAX": stats.get("bytes_limit"),
    **{name: find_version(name) for name in PACKAGES},
  }


def _describe_torch():
  import torch

  has_gpu = torch.cuda.is_available()
  return "cuda" if has_gpu else "cpu", {
    "torch": find_version("torch"),
    "torch device": torch.cuda.get_device_name() if has_gpu else "cpu",
    "CUDA of torch": torch.version.cuda,
  }


def measure_copy(copy: clock.Program, by: str, findings: Findings) -> float:
  """Return the bytes per second, read and written, and report them in a line.

  The copy adds one to each of many numbers, and its row has the "bytes" that a
  step reads and writes. The bandwidth is NaN if the copy failed.
  """
  until = time.time() + COPY_SECONDS
  clock.measure([copy], rounds=20, steps=10, until=until)
  row = copy.row
  if "milliseconds" not in row:
    findings.add_line(f"{by} could not measure a copy: {row.get('error')}")
    return float("nan")
  bandwidth = row["bytes"] / row["milliseconds"][1] * 1e3
  findings.add_line(
    f"Copy bandwidth by {by}: {bandwidth / 1e9:,.1f} GB/s, read and written"
  )
  findings.add_facts({f"copy bandwidth by {by}, bytes/s": bandwidth})
  return bandwidth
