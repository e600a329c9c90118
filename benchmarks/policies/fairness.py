"""Whether a policy loses one kind of batch for good: the share of the large.

The data decide which steps are skipped, so a policy that loses few steps may
lose the same batches every time. Each pattern mixes usual gradients with large
ones, which would be finite at a lower scale. Writes its part of policies.json,
and prints the table of README.md.

  python benchmarks/policies/fairness.py  # a minute
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np
import policies

STEPS = 100_000
FILE = pathlib.Path(__file__).parent / "policies.json"
COMPARED = ("dynamic", "headroom", "headroom, target -1")


class Pattern(NamedTuple):
  """Gradients of two kinds, both of shape (seed, step)."""

  log2_amax: np.ndarray
  is_large: np.ndarray


def main():
  losses_by_pattern = measure_all(make_patterns(STEPS))
  results = json.loads(FILE.read_text())
  results["patterns"] = losses_by_pattern
  FILE.write_text(json.dumps(results, indent=1) + "\n")
  print_table(losses_by_pattern)


def make_patterns(steps):
  """All patterns by name."""
  rng = np.random.default_rng(0)
  calm, noise = policies.make_calm(rng, steps)
  at = np.broadcast_to(np.arange(steps), calm.shape)

  def mixed(binades, is_large):
    return Pattern(calm + binades * is_large, is_large)

  def by_chance(period):
    return rng.random(calm.shape) < 1 / period

  rows = {
    f"{name} every {period}, 2**{binades}": mixed(binades, at % period < length)
    for name, length in (("pairs", 2), ("triples", 3), ("fives", 5))
    for period in (62, 100, 252)
    for binades in (7, 16, 24)
  }
  others = {
    "turns of 50 steps, 2**12": mixed(12, at // 50 % 2 == 1),
    "turns of 1,000 steps, 2**12": mixed(12, at // 1000 % 2 == 1),
    "bursts by chance, 2**12": mixed(12, make_bursts(rng, calm.shape)),
    "1 of 300, 2**7": mixed(7, at % 300 == 299),
    "1 of 300 by chance, 2**12": mixed(12, by_chance(300)),
    "1 of 1,000, 2**12": mixed(12, at % 1_000 == 999),
    "1 of 3,000, 2**12": mixed(12, at % 3_000 == 2_999),
    "1 of 5,000, 2**12": mixed(12, at % 5_000 == 4_999),
    "1 of 10,000, 2**12": mixed(12, at % 10_000 == 9_999),
  }
  tails = {
    "white noise of 3": 6 * noise,  # which has half a binade
    "Cauchy": np.log2(abs(rng.standard_cauchy(calm.shape))),
    "Student, 2 degrees": np.log2(abs(rng.standard_t(2, calm.shape))),
  }
  return rows | others | {k: is_in_tail(x) for k, x in tails.items()}


def make_bursts(rng, shape, period=200, length=3):
  """Whether a step is in a burst: by chance, as is when it ends."""
  is_large, chance = np.zeros(shape, bool), rng.random(shape)
  for step in range(1, shape[1]):
    rate = np.where(is_large[:, step - 1], 1 - 1 / length, 1 / period)
    is_large[:, step] = chance[:, step] < rate
  return is_large


def is_in_tail(log2_amax):
  """One step in a hundred counts as large."""
  limit = np.quantile(log2_amax, 0.99)
  return Pattern(policies.LEVEL + log2_amax, log2_amax > limit)


def measure_all(patterns):
  """Return the share of large gradients lost, and all lost steps, by policy."""
  results = {name: {} for name in patterns}
  for policy in COMPARED:
    for name, share, lost in measure(policies.POLICIES[policy], patterns):
      results[name][policy] = {"share_of_large": share, "lost": lost}
  return results


def measure(policy, patterns):
  """The name, the share of the large and the count of each pattern."""
  runs = np.concatenate([x.log2_amax for x in patterns.values()])
  _, finite, held = policies.simulate_all(policy, runs, np.zeros(len(runs)))
  lost = np.split(~(finite & held), len(patterns))
  for (name, pattern), is_lost in zip(patterns.items(), lost, strict=True):
    of_large = (is_lost & pattern.is_large).sum() / pattern.is_large.sum()
    yield name, round(float(of_large), 4), int(is_lost.sum()) // len(is_lost)


def print_table(results):
  print("| gradients | " + " | ".join(COMPARED) + " |")
  print("|---|" + "--:|" * len(COMPARED))
  for name, row in results.items():
    cells = [f"{x['share_of_large']:.1%} ({x['lost']:,})" for x in row.values()]
    print(" | ".join([f"| {name}".replace("2**", "2^"), *cells]) + " |")


if __name__ == "__main__":
  main()
