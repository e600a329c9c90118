"""Measures the cost of loss scaling, ours and the alternatives, on a CPU."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from typing import Any

import jax
import tqdm

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import report
from shared import clock
from shared.jax_program import JaxProgram
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
  _write(args.output, describe_environment(), results)


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
  """Drop those that compile 600 leaves for a quarter of an hour."""
  if workload != "adam, 600 leaves":
    return variants
  return [name for name in variants if name not in ("Flax DynamicScale", "jmp")]


def measure(
  workload: Any, names: list[str], rounds: int
) -> dict[str, dict[str, Any]]:
  """Return all figures of the named variants of one workload.

  The variants that they are measured against are among the names.

  Returns:
    By variant, by figure: the number, or [first quartile, median, third
    quartile] of a ratio taken within each round.
  """
  programs = [_make_program(name, workload) for name in tqdm.tqdm(names)]
  samples = clock.measure(programs, rounds=rounds, steps=1)
  n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
  results: dict[str, dict[str, Any]] = {}
  for i, (name, program) in enumerate(zip(names, programs, strict=True)):
    if "error" in program.row:
      raise RuntimeError(f"{name} failed: {program.row['error']}")
    results[name] = get_figures(program, n_params)
    baseline = names.index(VARIANTS[name][1])
    results[name] |= compare_times(samples, i, baseline)
  for name, figures in results.items():
    _compare_figures(figures, results[VARIANTS[name][1]])
  return results


def _make_program(name, workload):
  make, baseline = VARIANTS[name]
  # Baselines can't skip a step: they would continue with NaN.
  bad_data = None if name == baseline else workload.overflowing_data()
  data, bad_data = jax.device_put((workload.data, bad_data))
  return JaxProgram({}, *make(workload), [data], bad_data, time.process_time)


def get_figures(program, n_params):
  """Return the figures that don't depend on the clock, or only once."""
  traced, compiled, *seconds = program.stages
  trace_seconds, lower_seconds, compile_seconds = seconds
  cost = compiled.cost_analysis()
  return {
    "bytes": cost["bytes accessed"] / n_params,
    "flops": cost["flops"] / n_params,
    "temporary_bytes": program.row["temporary_bytes"] / n_params,
    "aliased_bytes": program.row["aliased_bytes"] / n_params,
    "equations": len(traced.jaxpr.eqns),
    "instructions": compiled.as_text().count(" = "),
    "trace_seconds": trace_seconds + lower_seconds,
    "compile_seconds": compile_seconds,
  }


def compare_times(samples, program, baseline):
  """Return the times, and ratios of two times of the same round."""
  own, base = samples[program, False], samples[baseline, False]
  wall, cpu = 0, 1
  times = {
    "milliseconds": 1e3 * statistics.median(sample[wall] for sample in own),
    "time": compute_ratios(own, base, wall),
    "cpu_time": compute_ratios(own, base, cpu),
  }
  if skipped := samples.get((program, True)):
    times["skipped_time"] = compute_ratios(skipped, own, wall)
    times["skipped_cpu_time"] = compute_ratios(skipped, own, cpu)
  return times


def _compare_figures(figures, baseline):
  total = lambda f: f["trace_seconds"] + f["compile_seconds"]
  figures["bytes_ratio"] = figures["bytes"] / baseline["bytes"]
  figures["trace_and_compile_ratio"] = total(figures) / total(baseline)


def compute_ratios(own, base, key):
  """Return the quartiles of the ratios of rounds, by a key of both samples."""
  return clock.quartiles(
    [a[key] / b[key] for a, b in zip(own, base, strict=True)]
  )


def describe_environment():
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
  print(", ".join(f"{key}: {value}" for key, value in environment.items()))
  if set(report.SUMMARY) <= set(results):
    print(f"\n{report.summary(results)}")
  for name, variants in results.items():
    print(f"\n{report.folded(name, variants)}")


if __name__ == "__main__":
  main()
