"""Measures the cost of loss scaling, ours and the alternatives, on a CPU."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys

import jax

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from measure import measure
import report
from shared.variants import VARIANTS
from shared.workloads import make_workloads

HERE = pathlib.Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "optax", "flax", "jmp", "keras")


def main() -> None:
  """Run the measurements of the command line, and print and write them."""
  args = _parse_args()
  workloads = make_workloads(args.size)
  results = {}
  for name in args.workloads or workloads:
    print(name, flush=True)
    variants = _drop_slow_compiles(args.variants, name)
    results[name] = measure(workloads[name](), variants, args.rounds)
  _write(args.output, _describe_environment(), results)


def _parse_args():
  names = list(make_workloads(1))
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("--workloads", nargs="+", choices=names, metavar="NAME")
  add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
  add("--rounds", type=int, default=20)
  add("--size", type=float, default=1, help="factor of numbers of params")
  add("--output", type=pathlib.Path, default=HERE)
  args = parser.parse_args()
  missing = {VARIANTS[name][1] for name in args.variants} - set(args.variants)
  args.variants = sorted(missing) + args.variants
  return args


def _drop_slow_compiles(variants, workload):
  """All but those whose compile time is quadratic in the number of leaves.

  With 600 leaves they would take a quarter of an hour.
  """
  if workload != "adam, 600 leaves":
    return variants
  return [name for name in variants if name not in ("Flax DynamicScale", "jmp")]


def _describe_environment():
  device = jax.devices()[0]
  return {
    "command": shlex.join(["python", *sys.argv]),
    "device": f"{len(jax.devices())} x {device.device_kind}",
    "platform": device.platform,
    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in PACKAGES},
  }


def _write(output, environment, results):
  output.mkdir(parents=True, exist_ok=True)
  content = {"environment": environment, "results": results}
  text = json.dumps(content, indent=1)
  (output / "results.json").write_text(text + "\n")
  # On GPU the CPU only waits; on CPU others may take it away meanwhile.
  clock = "cpu_time" if environment["platform"] == "cpu" else "time"
  report.plot(results, clock, output / "results.png")
  print(", ".join(f"{key}: {value}" for key, value in environment.items()))
  if set(report.SUMMARY) <= set(results):
    print(f"\n{report.summary(results)}")
  for name, variants in results.items():
    print(f"\n{report.folded(name, variants)}")


if __name__ == "__main__":
  main()
