"""Random runs of sparse, jumping, spiking and NaN gradients, against dynamic.

Nobody wrote these down: each is a row of stretches whose level, noise, share of
zeros, spikes and NaNs are drawn at random. No gradients fall by more than 28
binades at once; docs/policies.md says that these are not found again.
"""

from helpers.benchmark import load_benchmark
import numpy as np
import pytest

import optax_lossscale as ols

RUNS, STEPS = 400, 4000


def make_runs(rng):
  """Binary logarithms of the largest gradients, shape (run, step)."""
  runs = np.empty((RUNS, STEPS))
  for run in runs:
    cuts = np.sort(rng.integers(0, STEPS, rng.integers(0, 5)))
    level = rng.uniform(-28, -8)
    for stretch in np.split(run, cuts):
      level += rng.choice([0, 0, 5, -5, 10, -10, 14, -14, 20, -20])
      level = np.clip(level, -28, -8)
      stretch[:] = make_stretch(rng, level, stretch.size)
  return runs


def make_stretch(rng, level, size):
  share = lambda choices: rng.random(size) < rng.choice(choices)
  log2_amax = level + rng.choice([0, 0.3, 1, 3]) * rng.normal(size=size)
  log2_amax += rng.uniform(2, 8) * share([0, 0, 0.005, 0.02, 0.1])
  has_grads = share([1, 1, 0.5, 0.125, 0.025, 0.005, 0])
  log2_amax = np.where(has_grads, log2_amax, -np.inf)
  return np.where(share([0, 0, 0, 0.002, 0.01, 0.1, 0.5]), np.nan, log2_amax)


@pytest.mark.parametrize("seed", range(8))
def test_no_run_starves_and_all_lose_far_less_than_with_the_dynamic_rule(seed):
  adversary = load_benchmark("policies/adversary")
  runs = make_runs(np.random.default_rng(seed))
  (headroom, its_row), (dynamic, row_of_dynamic) = (
    (lost.sum(), adversary.longest_rows(lost, informative).max())
    for lost, informative in (
      adversary.find_lost(policy, runs)
      for policy in (ols.HeadroomLossScale(), ols.DynamicLossScale())
    )
  )
  assert headroom < dynamic / 5
  # Of some thousand in a run.
  assert its_row < 300
  assert row_of_dynamic > 1500
