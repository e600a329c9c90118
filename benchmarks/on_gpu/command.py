"""The command line: runs the parts within the time."""

import argparse
import gc
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import signal
import sys
import time

from shared import clock

from on_gpu import sizes
from on_gpu.findings import Findings, share_time

PACKAGES = ("jax", "jaxlib", "optax", "flax", "jmp", "numpy")
RESERVE = 8.0  # seconds for ending the last part
# By name, the most important one first: the module whose `run` measures it, the
# first arguments of `run`, and the share of the time, relative to later parts.
PARTS = {
  "optimizers": ("jax_optimizers", [], 22),
  "transformer": ("jax_training", ["transformer, unrolled"], 26),
  "resnet": ("jax_training", ["residual network"], 20),
}


def main(description: str | None) -> None:
  """Run the measurements of the command line."""
  args = _parse_args(description)
  until = time.time() + 60 * args.minutes
  # A compiler cannot be interrupted: this ends the process, which has its rows.
  signal.alarm(round(60 * args.minutes + RESERVE))
  scratch = args.out.resolve() / "scratch"
  scratch.mkdir(parents=True, exist_ok=True)
  _set_environment(scratch, is_tiny=args.size == "tiny")
  findings = Findings(args.out)
  findings.add_facts(_describe_run(args) | _describe_device(args.size))
  parts = {name: PARTS[name] for name in args.parts}
  weights = [weight for _, _, weight in parts.values()]
  for name, part, end in share_time(parts, until - RESERVE, weights):
    _run_part(name, part, args.size, end, findings)
  shutil.rmtree(scratch, ignore_errors=True)
  print(f"\nAll of this is in {args.out}.", flush=True)


def _parse_args(description):
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--out", type=pathlib.Path, required=True, help="folder of the results")
  add("--minutes", type=float, default=8, help="the time for all")
  size_help = "full: an H100; small: a GPU with 16 GB; tiny: to try it out"
  add("--size", choices=list(sizes.SIZES), default="full", help=size_help)
  add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
  return parser.parse_args()


def _set_environment(scratch, *, is_tiny):
  """Set the variables that JAX reads when it is imported or starts a device."""
  for name in ("TMPDIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
    os.environ[name] = str(scratch)
  os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
  if is_tiny:  # Optimizing tiny programs takes longer than it saves.
    flags = os.environ.get("XLA_FLAGS", "")
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {level}"


def _describe_run(args):
  return {
    "command": shlex.join(["python3", *sys.argv]),
    "date": time.strftime("%Y-%m-%d"),
    "python": platform.python_version(),
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "size": args.size,
    "minutes": args.minutes,
  }


def _describe_device(size):
  """Return the facts; exit if the device can't measure at this size."""
  import jax

  device = jax.devices()[0]
  if device.platform == "cpu" and size != "tiny":
    sys.exit(
      "JAX finds no GPU. Is JAX for CUDA installed? To try the benchmark out on"
      " a CPU, add --size tiny."
    )
  stats = device.memory_stats() or {}
  installed = {d.name: d.version for d in importlib.metadata.distributions()}
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "platform version": ", ".join(device.client.platform_version.split("\n")),
    "device memory for JAX": stats.get("bytes_limit"),
    **{name: installed.get(name) for name in PACKAGES},
  }


def _run_part(name, part, size, until, findings):
  module, first, _ = part
  seconds = until - time.time()
  if seconds <= 0:
    findings.add_line(f"Left out, since no time is left: {name}")
    return
  print(f"\n-- {name}, {seconds:.0f} s at most", flush=True)
  row: dict[str, str] = {}
  with clock.catch(row):
    measure = importlib.import_module(f"on_gpu.{module}").run
    measure(*first, sizes.SIZES[size], until, findings)
  if row:
    findings.add_line(f"{name} ended: {row['error']}")
  gc.collect()  # Free the memory of this part for the next.
