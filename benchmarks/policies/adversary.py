"""A search for gradients on which a policy starves, beside the dynamic rule.

Draws runs at random: half of them are periodic mixtures, whose spikes, NaNs and
gradients come in every so many steps; in the other half they come by chance.
Writes its part of policies.json, and prints its table of README.md.

  python benchmarks/policies/adversary.py  # 10,000 runs; some minutes
"""

import json
import pathlib

import numpy as np
import policies

import optax_lossscale as ols

RUNS, STEPS, AT_ONCE = 10_000, 4_000, 500
POLICIES = {
  "dynamic": ols.DynamicLossScale(),
  "headroom": ols.HeadroomLossScale(),
}


def main():
  rng = np.random.default_rng(0)
  found = {name: [] for name in POLICIES}
  for _ in range(RUNS // AT_ONCE):
    runs = make_runs(rng, AT_ONCE, STEPS)
    for name, policy in POLICIES.items():
      found[name].append(measure(policy, runs))
  found = {name: np.concatenate(x, axis=1) for name, x in found.items()}
  file = pathlib.Path(__file__).parent / "policies.json"
  results = json.loads(file.read_text())
  results["adversary"] = {name: summarize(*x) for name, x in found.items()}
  results["adversary"]["headroom"]["runs_worse_than_dynamic"] = int(
    (found["headroom"][0] > found["dynamic"][0]).sum()
  )
  file.write_text(json.dumps(results, indent=1) + "\n")
  print(json.dumps(results["adversary"], indent=1))


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


def measure(policy, runs):
  """How many informative steps each run lost, in all and in a row, of how many.

  Returns:
    An array of shape (3, run).
  """
  _, finite, held = policies.simulate_one(policy, policies.Process(runs))
  informative = np.isfinite(runs)
  lost = informative & ~(finite & held)
  rows = longest_rows(lost, informative)
  return np.stack([lost.sum(axis=1), rows, informative.sum(axis=1)])


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
