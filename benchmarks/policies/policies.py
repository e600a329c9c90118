"""Compare policies on the same simulated gradients: what each one loses.

Simulates 100,000 steps of many kinds, writes its part of policies.json, and
prints the tables of README.md.

  python benchmarks/policies/policies.py  # half a minute
"""

import argparse
import json
import pathlib
import sys

import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from shared.tables import markdown
import simulation

import optax_lossscale as ols

POLICIES = {
  "fixed, 2**15": ols.FixedLossScale(2.0**15),
  "dynamic": ols.DynamicLossScale(),
  "dynamic, every 200": ols.DynamicLossScale(growth_interval=200),
  "dynamic, hysteresis 2": ols.DynamicLossScale(hysteresis=2),
  "headroom": ols.HeadroomLossScale(),
  "headroom, target -1": ols.HeadroomLossScale(margin=1),
}
# In the tables; policies.json has all.
COMPARED = ("dynamic", "dynamic, every 200", "headroom", "headroom, target -1")
IN_PATTERNS = ("dynamic", "headroom", "headroom, target -1")
FOLDER = pathlib.Path(__file__).parent


def main() -> None:
  """Simulate all policies, write the results, and print them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=100_000)
  parser.add_argument("--output", type=pathlib.Path, default=FOLDER)
  args = parser.parse_args()
  processes = simulation.make_processes(args.steps)
  traces = {n: simulation.simulate(p, processes) for n, p in POLICIES.items()}
  file = args.output / "policies.json"
  results = json.loads(file.read_text()) if file.exists() else {}
  by_process = results.setdefault("simulation", {})
  for name, process in processes.items():
    by_process.setdefault(name, {}).update(
      {policy: summarize(process, traces[policy][name]) for policy in POLICIES}
    )
  patterns = simulation.make_patterns(args.steps)
  shares = {p: measure_shares(POLICIES[p], patterns) for p in IN_PATTERNS}
  results["patterns"] = {
    name: {policy: shares[policy][name] for policy in IN_PATTERNS}
    for name in patterns
  }
  file.write_text(json.dumps(results, indent=1) + "\n")
  print_tables(by_process, results["patterns"])


def summarize(process, trace):
  """Return the figures of a process under a policy, one for each seed."""
  log2_scale, _, _ = trace
  level = process.log2_amax if process.level is None else process.level
  under = simulation.TOP - level - log2_scale
  rows = {
    "lost": simulation.find_lost(process.log2_amax, trace).sum(axis=1),
    "binades_under": np.median(under, axis=1),
    "until_near": find_first(under <= simulation.NEAR),
  }
  if process.change is not None:
    rows["until_near_again"] = find_first(
      under[:, process.change :] <= simulation.NEAR
    )
  return {name: [to_json(x) for x in row] for name, row in rows.items()}


def find_first(flags):
  """Return the first step at which the flag is set; inf if it never is."""
  return np.where(flags.any(axis=1), flags.argmax(axis=1), np.inf)


def to_json(x):
  x = round(float(x), 1)
  return None if not np.isfinite(x) else int(x) if x == int(x) else x


def measure_shares(policy, patterns):
  """Return the lost share of the large steps, and the mean of all losses."""
  results = {}
  for name, trace in simulation.simulate(policy, patterns).items():
    lost = simulation.find_lost(patterns[name].log2_amax, trace)
    is_large = patterns[name].is_large
    share = (lost & is_large).sum() / is_large.sum()
    results[name] = {
      "share_of_large": round(float(share), 4),
      "lost": int(lost.sum()) // len(lost),
    }
  return results


def print_tables(by_process, patterns):
  """Print a table of each figure, with the rows that differ from "calm"."""
  for column in ("lost", "binades_under", "until_near", "until_near_again"):
    rows = [["gradients", *COMPARED]]
    for process, found in by_process.items():
      is_usual = process != "calm" and all(
        found[name].get(column) == by_process["calm"][name].get(column)
        for name in ("dynamic", "headroom")
      )
      if not is_usual and column in found["dynamic"]:
        cells = [format_cell(found[name][column], column) for name in COMPARED]
        rows.append([process, *cells])
    print_table(column.replace("_", " ").capitalize(), rows)
  rows = [["gradients", *IN_PATTERNS]]
  show = "{share_of_large:.1%} ({lost:,})".format_map
  rows += [[name, *map(show, row.values())] for name, row in patterns.items()]
  print_table("Which batches are lost", rows)


def print_table(title, rows):
  rows = [[cell.replace("2**", "2^") for cell in row] for row in rows]
  print(f"\n### {title}\n\n{markdown(rows, right_from=1)}")


def format_cell(values, column):
  """Return the median over the seeds, and the range if there is any."""
  missing = "never" if column.startswith("until") else "NaN"
  values = sorted(np.inf if x is None else x for x in values)
  middle, low, high = values[len(values) // 2], values[0], values[-1]
  show = lambda x: missing if x == np.inf else f"{x:,.5g}"
  if low == high:
    return show(middle)
  return f"{show(middle)} ({show(low)} to {show(high)})"


if __name__ == "__main__":
  main()
