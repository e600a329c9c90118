"""Measures tracing and compilation by the number of arrays, on a CPU.

Unrolled models have thousands of arrays. An update is a program of some 20
operations for each of them, which is traced and compiled once.

  python benchmarks/cpu/many_arrays.py --arrays 1000 2000 --rounds 3
"""

import argparse
import gc
import importlib.metadata
import json
import pathlib
import platform
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tqdm

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared.clock import quartiles
from shared.jax_program import compile_step
from shared.steps import make_step
from shared.tables import markdown

import optax_lossscale as ols

OUTPUT = pathlib.Path(__file__).with_suffix(".json")
SIDE = 16
ADAM = optax.adam(1e-3)
OPTIMIZERS = {
  "bare": ADAM,
  "ours": ols.with_loss_scaling(ADAM),
  '"headroom"': ols.with_loss_scaling(ADAM, "headroom"),
  "`max_norm`": ols.with_loss_scaling(ADAM, max_norm=1.0),
  "`apply_if_finite`": optax.apply_if_finite(ADAM, 5),
}
PACKAGES = ("jax", "jaxlib", "optax")


def measure(name: str, n_arrays: int) -> dict[str, float]:
  """CPU seconds of tracing and compiling an update with one optimizer."""
  tx = OPTIMIZERS[name]
  leaf = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
  params = {f"w{i:04}": leaf for i in range(n_arrays)}
  state = jax.eval_shape(tx.init, params)
  gc.collect()
  # CPU time, since it does not grow when others use the machine.
  stages = compile_step(
    make_step(tx), (params, state), params, clock=time.process_time
  )
  return {"trace": stages.trace_seconds, "compile": stages.compile_seconds}


def run(n_arrays: int, rounds: int) -> dict[str, Any]:
  """Return the figures by optimizer; a ratio is taken within a round."""
  seconds = {name: [] for name in OPTIMIZERS}
  for _ in tqdm.trange(rounds, desc=f"{n_arrays} arrays"):
    for name in random.sample(list(OPTIMIZERS), len(OPTIMIZERS)):
      seconds[name].append(measure(name, n_arrays))
  results: dict[str, Any] = {}
  for name, own in seconds.items():
    results[name] = {"rounds": rounds}
    for key in ("trace", "compile"):
      pairs = zip(own, seconds["bare"], strict=True)
      results[name] |= {
        key: quartiles([found[key] for found in own])[1],
        f"{key}_ratio": quartiles([a[key] / b[key] for a, b in pairs]),
      }
  return results


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
  """Return a row for each number of arrays and each optimizer, in Markdown."""
  rows = [["arrays", "Adam", "trace, s", "ratio", "compile, s", "ratio"]]
  for n_arrays, by_name in results.items():
    for name, found in by_name.items():
      cells = [f"{int(n_arrays):,}", name]
      for figure in ("trace", "compile"):
        low, median, high = found[f"{figure}_ratio"]
        cells.append(f"{found[figure]:.1f}")
        cells.append(f"{median:.2f} [{low:.2f}, {high:.2f}]")
      rows.append(cells)
  return markdown(rows, right_from=2)


def main() -> None:
  """Run the measurements of the command line, and print and write them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--arrays", nargs="+", type=int, default=[1000, 2000])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
  args = parser.parse_args()
  for name in OPTIMIZERS:  # Leave out what a process computes once.
    measure(name, 3)
  versions = {name: importlib.metadata.version(name) for name in PACKAGES}
  found = {"python": platform.python_version(), **versions, "results": {}}
  if args.output.exists():  # Keep other numbers of arrays.
    found["results"] = json.loads(args.output.read_text())["results"]
  for n_arrays in args.arrays:
    found["results"][str(n_arrays)] = run(n_arrays, args.rounds)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
  print(table(found["results"]))


if __name__ == "__main__":
  main()
