"""Compare policies on the same simulated gradients: which batches each loses.

Simulates 100,000 steps of many kinds, writes its part of policies.json, and
prints the table of README.md.

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
  "dynamic": ols.DynamicLossScale(),
  "headroom": ols.HeadroomLossScale(),
  "headroom, target -1": ols.HeadroomLossScale(margin=1),
}
SEEDS = 5
LEVEL = -14  # log2 of the largest gradient, on average
FOLDER = pathlib.Path(__file__).parent


def main() -> None:
  """Simulate all policies, write the results, and print them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=100_000)
  parser.add_argument("--output", type=pathlib.Path, default=FOLDER)
  args = parser.parse_args()
  found = {
    name: {
      policy: measure_shares(POLICIES[policy], *pattern) for policy in POLICIES
    }
    for name, pattern in make_patterns(args.steps).items()
  }
  file = args.output / "policies.json"
  results = json.loads(file.read_text()) if file.exists() else {}
  file.write_text(json.dumps(results | {"patterns": found}, indent=1) + "\n")
  show = "{share_of_large:.1%} ({lost:,})".format_map
  rows = [
    [name.replace("2**", "2^"), *map(show, shares.values())]
    for name, shares in found.items()
  ]
  print(markdown([["gradients", *POLICIES], *rows], right_from=1))


def make_patterns(steps: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Return mixtures of usual gradients with large ones, by name.

  The data decide which steps are skipped, so a policy that loses few steps may
  lose the same batches every time.

  Returns:
    The largest gradient in log2, and whether it counts as large, of each step.
    Both have the shape (seed, step).
  """
  rng = np.random.default_rng(0)
  calm, noise = make_calm(rng, steps)
  at = np.broadcast_to(np.arange(steps), calm.shape)

  def mix(binades, is_large):
    return calm + binades * is_large, is_large

  def every(n):
    return at % n == n - 1

  rows = {
    f"{name} every {period}, 2**{binades}": mix(binades, at % period < length)
    for name, length in (("pairs", 2), ("triples", 3), ("fives", 5))
    for period in (62, 100, 252)
    for binades in (7, 16, 24)
  }
  others = {
    "turns of 50 steps, 2**12": mix(12, at // 50 % 2 == 1),
    "turns of 1,000 steps, 2**12": mix(12, at // 1000 % 2 == 1),
    "bursts by chance, 2**12": mix(12, _make_bursts(rng, calm.shape)),
    "1 of 300, 2**7": mix(7, every(300)),
    "1 of 300 by chance, 2**12": mix(12, rng.random(calm.shape) < 1 / 300),
    **{
      f"1 of {period:,}, 2**12": mix(12, every(period))
      for period in (1_000, 3_000, 5_000, 10_000)
    },
  }
  tails = {
    "white noise of 3": 6 * noise,  # which has half a binade
    "Cauchy": np.log2(abs(rng.standard_cauchy(calm.shape))),
    "Student, 2 degrees": np.log2(abs(rng.standard_t(2, calm.shape))),
  }
  # In a heavy tail, one step in a hundred counts as large.
  heavy = {
    name: (LEVEL + x, x > np.quantile(x, 0.99)) for name, x in tails.items()
  }
  return rows | others | heavy


def make_calm(
  rng: np.random.Generator, steps: int
) -> tuple[np.ndarray, np.ndarray]:
  """Return gradients with correlated noise of half a binade; white noise."""
  shocks = rng.normal(size=(SEEDS, steps)) * 0.5
  calm = np.empty_like(shocks)
  calm[:, 0] = shocks[:, 0]
  for t in range(1, steps):
    calm[:, t] = 0.9 * calm[:, t - 1] + np.sqrt(1 - 0.9**2) * shocks[:, t]
  return LEVEL + calm, shocks


def _make_bursts(rng, shape, period=200, length=3):
  """Return which steps are in a burst, which begins and ends by chance."""
  is_large, chance = np.zeros(shape, bool), rng.random(shape)
  for step in range(1, shape[1]):
    rate = np.where(is_large[:, step - 1], 1 - 1 / length, 1 / period)
    is_large[:, step] = chance[:, step] < rate
  return is_large


def measure_shares(policy, log2_amax, is_large):
  """Return the lost share of the large steps, and the mean of all losses."""
  trace = simulation.simulate_runs(policy, log2_amax)
  lost = simulation.find_lost(log2_amax, trace)
  share = (lost & is_large).sum() / is_large.sum()
  return {
    "share_of_large": round(float(share), 4),
    "lost": int(lost.sum()) // len(lost),
  }


if __name__ == "__main__":
  main()
