"""Measures AdamW with master weights on a CPU, against masters by hand."""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import run
from shared import clock
from shared.jax_program import JaxProgram
from shared.master_weights import count_resident_bytes, make_workload, VARIANTS
from shared.tables import tabulate

BASELINE = "float32 masters and a bfloat16 copy"
# The numbers of parameters are 16.8 million, and 262,144: the state of the
# latter stays in the caches.
SIZES = {"4 x 2048 x 2048": 1, "4 x 256 x 256": 1 / 64}
COLUMNS = {
  "AdamW": "{name}",
  "time": "{time[1]:.2f} [{time[0]:.2f}, {time[2]:.2f}]",
  "CPU time": "{cpu_time[1]:.2f} [{cpu_time[0]:.2f}, {cpu_time[2]:.2f}]",
  "bytes moved": "{bytes:.0f}",
  "resident": "{resident:.0f}",
  "temporary": "{temporary_bytes:.1f}",
}


def main() -> None:
  """Print tables, and write the figures to ``master_weights.json``."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40)
  args = parser.parse_args()
  results = {name: measure(x, args.rounds) for name, x in SIZES.items()}
  content = {"environment": run.describe_environment(), "results": results}
  path = pathlib.Path(__file__).with_suffix(".json")
  path.write_text(json.dumps(content, indent=1) + "\n")
  for size, variants in results.items():
    print(f"\n{size}\n\n{make_table(variants)}")


def make_table(variants: dict[str, dict[str, Any]]) -> str:
  return tabulate(COLUMNS, [{"name": n} | f for n, f in variants.items()])


def measure(scale: float, rounds: int) -> dict[str, dict[str, Any]]:
  """Return the figures of each variant; the times relative to the baseline."""
  workload = make_workload(scale)
  n_params = sum(leaf.size for leaf in jax.tree.leaves(workload.params))
  data = jax.device_put(workload.data)
  programs, results = [], {}
  for name, make in VARIANTS.items():
    step, carry = make(workload)
    programs.append(JaxProgram({}, step, carry, [data]))
    results[name] = run.get_figures(programs[-1], n_params)
    results[name]["resident"] = count_resident_bytes(carry, workload)
  samples = clock.measure(programs, rounds=rounds, steps=1)
  for i, figures in enumerate(results.values()):
    baseline = list(VARIANTS).index(BASELINE)
    figures |= run.compare_times(samples, i, baseline)
  return results


if __name__ == "__main__":
  main()
