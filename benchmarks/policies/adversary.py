"""Gradients on which a policy starves: random ones, and a search for the worst.

Draws runs at random: half of them are periodic mixtures, whose spikes, NaNs and
gradients come at regular steps; in the other half they come at random steps.
The search mutates those of genomes.py, keeps the worst, and begins again, for
so many seconds in each category. Both write their part of policies.json, and
print it for README.md.

  python benchmarks/policies/adversary.py  # 10,000 runs; some minutes
  python benchmarks/policies/adversary.py search  # a minute a category
  python benchmarks/policies/adversary.py search 60 "headroom, target -1"
  python benchmarks/policies/adversary.py fairness  # the same for large steps

The fitness of a sequence is the longest row of steps that are lost, or, for
fairness, the largest share of the large ones: those in the upper half of the
binades of the sequence, if there are a hundred of them.
"""

import json
import pathlib
import sys
import time
from typing import NamedTuple

import genomes
import numpy as np
import policies

import optax_lossscale as ols

RUNS, STEPS, AT_ONCE = 10_000, 4_000, 500
FEWEST_LARGE = 100  # With fewer, the steps until a policy adapts dominate.
# The search: how many genomes at once, of which so many are kept, three at most
# that lose as many steps in a row.
POPULATION, KEPT, ALIKE = 256, 48, 3
FILE = pathlib.Path(__file__).parent / "policies.json"
POLICIES = {
  "dynamic": ols.DynamicLossScale(),
  "headroom": ols.HeadroomLossScale(),
}


def main():
  name, *options = sys.argv[1:] or ["random"]
  if name == "random":
    write("adversary", draw_runs())
  else:
    seconds = float(options[0]) if options else 60
    found = find_worst_of_all(seconds, options[1:] or POLICIES, BADNESS[name])
    if options[1:]:
      print(json.dumps(found, indent=1))
    else:
      write(name, {"seconds": seconds} | found)


def write(part, found):
  results = json.loads(FILE.read_text())
  results[part] = found
  FILE.write_text(json.dumps(results, indent=1) + "\n")
  print(json.dumps(found, indent=1))


def draw_runs():
  """Measure the steps that each policy loses in random runs."""
  rng = np.random.default_rng(0)
  losses_by_policy = {name: [] for name in POLICIES}
  for _ in range(RUNS // AT_ONCE):
    runs = make_runs(rng, AT_ONCE, STEPS)
    for name, policy in POLICIES.items():
      losses_by_policy[name].append(measure(policy, runs))
  losses_by_policy = {
    name: np.concatenate(x, axis=1) for name, x in losses_by_policy.items()
  }
  results = {name: summarize(*x) for name, x in losses_by_policy.items()}
  results["headroom"]["runs_worse_than_dynamic"] = int(
    (losses_by_policy["headroom"][0] > losses_by_policy["dynamic"][0]).sum()
  )
  return results


class Find(NamedTuple):
  """A genome, and the steps that a policy lost in it."""

  lost: int
  longest_row: int
  lost_share: float
  lost_of_large: float
  genome: genomes.Genome


def row_badness(find):
  return find.longest_row, find.lost_share


def large_badness(find):
  return find.lost_of_large, find.lost_share


BADNESS = {"search": row_badness, "fairness": large_badness}


def find_worst_of_all(seconds, names, badness=row_badness):
  """Search the worst genome of each policy, and measure all policies on it."""
  results = {}
  for category in genomes.CATEGORIES:
    results[category] = {}
    for name in names:
      policy = policies.POLICIES[name]
      worst, num_tried = find_worst(policy, category, seconds, badness=badness)
      others = {
        other: measure_genomes(policies.POLICIES[other], category, worst[:1])[0]
        for other in POLICIES
      }
      results[category][name] = {
        "tried": num_tried,
        "longest_row": worst[0].longest_row,
        "lost_share": round(worst[0].lost_share, 3),
        "lost_of_large": round(worst[0].lost_of_large, 3),
        "longest_row_by": {x: find.longest_row for x, find in others.items()},
        "lost_of_large_by": {
          x: round(find.lost_of_large, 3) for x, find in others.items()
        },
        "genome": worst[0].genome,
      }
      print(category, name, results[category][name], file=sys.stderr)
  return results


def find_worst(policy, category, seconds, seed=0, badness=row_badness):
  """The worst finds, and how many genomes were tried.

  The genomes do not depend on how fast the machine is, but how many there are.
  """
  rng, kind = np.random.default_rng(seed), genomes.CATEGORIES[category]
  end, worst, num_tried = time.monotonic() + seconds, [], 0
  while not worst or time.monotonic() < end:
    new = [genomes.draw(rng, kind) for _ in range(POPULATION // 4)]
    while len(new) < POPULATION:
      # The worst most often, and random ones the first time.
      parents = [x.genome for x in worst] or new
      parent = parents[int(len(parents) * rng.random() ** 2)]
      new.append(genomes.mutate(rng, parent, kind))
    new = measure_genomes(policy, category, new)
    worst = keep_worst(worst + new, badness)
    num_tried += len(new)
  return worst, num_tried


def keep_worst(finds, badness=row_badness):
  finds = sorted(finds, key=badness, reverse=True)
  kept, alike = [], {}
  for find in finds:
    bad = round(badness(find)[0], 2)
    alike[bad] = alike.get(bad, 0) + 1
    if alike[bad] <= ALIKE:
      kept.append(find)
  return kept[:KEPT]


def measure_genomes(policy, category, found):
  """Return a Find for each genome or each other policy's find."""
  found = [x.genome if isinstance(x, Find) else x for x in found]
  kind = genomes.CATEGORIES[category]
  runs = np.stack([genomes.render(genome, kind) for genome in found])
  hidden = [genome.hidden for genome in found]
  lost, informative = find_lost(policy, runs, hidden)
  rows = longest_rows(lost, informative)
  counts = lost.sum(axis=1)
  shares = counts / np.maximum(informative.sum(axis=1), 1)
  of_large = compute_large_shares(runs, lost, informative)
  columns = [x.tolist() for x in (counts, rows, shares, of_large)]
  return [Find(*x) for x in zip(*columns, found, strict=True)]


def compute_large_shares(runs, lost, informative):
  """Return the lost share of steps in the upper half of the binades, by run."""
  known = np.where(informative, runs, np.nan)
  known[~informative.any(axis=1)] = 0  # these runs have no largest gradient
  low, high = np.nanmin(known, axis=1), np.nanmax(known, axis=1)
  is_large = informative & (runs > ((low + high) / 2)[:, None])
  count = is_large.sum(axis=1)
  share = (lost & is_large).sum(axis=1) / np.maximum(count, 1)
  return np.where(count >= FEWEST_LARGE, share, 0)


def make_runs(rng, count, steps):
  """Binary logarithms of the largest gradients, shape (run, step)."""
  return np.stack([make_run(rng, steps) for _ in range(count)])


def make_run(rng, steps):
  """-inf where all gradients are zero, NaN where they are NaN."""
  comes_every = every if rng.random() < 0.5 else by_chance
  run = make_level(rng, steps)
  run += rng.choice([0, 0.3, 1, 3]) * rng.normal(size=steps)
  if rng.random() < 0.6:
    run += rng.uniform(4, 30) * comes_every(rng, draw_period(rng), steps)
  if rng.random() < 0.6:
    # A share of zeros between 0 and 99.9%.
    has_grads = comes_every(rng, 10 ** rng.uniform(0, 3), steps)
    run = np.where(has_grads, run, -np.inf)
  if rng.random() < 0.6:
    run[comes_every(rng, draw_period(rng), steps)] = np.nan
  if rng.random() < 0.3:
    run[: rng.choice([1, 1, 10, 200])] = np.nan
  return run.astype(np.float32)


def make_level(rng, steps):
  """The level of a run, with up to four falls or rises of 4 to 40 binades."""
  level = rng.uniform(-24, -4)
  levels = np.full(steps, level)
  for at in np.sort(rng.integers(0, steps, rng.integers(0, 5))):
    level += rng.choice([-1, 1]) * rng.uniform(4, 40)
    level = np.clip(level, -60, 10)
    levels[at:] = level
  return levels


def draw_period(rng):
  """Between 2 and 1,000, as likely short as long."""
  return np.exp(rng.uniform(np.log(2), np.log(1000)))


def every(rng, period, steps):
  period = max(1, round(period))
  return (np.arange(steps) + rng.integers(period)) % period == 0


def by_chance(rng, period, steps):
  return rng.random(steps) < 1 / period


def measure(policy, runs, on_the_way=0):
  """How many informative steps each run lost, in all and in a row, of how many.

  Returns:
    An array of shape (3, run).
  """
  lost, informative = find_lost(policy, runs, on_the_way)
  rows = longest_rows(lost, informative)
  return np.stack([lost.sum(axis=1), rows, informative.sum(axis=1)])


def find_lost(policy, runs, on_the_way=0):
  """Which informative steps are lost, and which are informative."""
  on_the_way = np.broadcast_to(on_the_way, len(runs))
  _, finite, held = policies.simulate_all(policy, runs, on_the_way)
  informative = np.isfinite(runs)
  return informative & ~(finite & held), informative


def longest_rows(lost, informative):
  """The longest row of informative steps that are lost, for each run."""
  rows = []
  for is_lost, counts in zip(lost, informative, strict=True):
    kept = np.flatnonzero(~is_lost[counts])
    edges = np.concatenate([[-1], kept, [counts.sum()]])
    rows.append(np.diff(edges).max() - 1)
  return np.array(rows)


def summarize(lost, rows, informative):
  return {
    "informative": int(informative.sum()),
    "lost": int(lost.sum()),
    "longest_row": int(rows.max()),
    "runs_with_a_row_over_128": int((rows > 128).sum()),
    "runs_that_lost_half": int((lost > informative / 2).sum()),
  }


if __name__ == "__main__":
  main()
