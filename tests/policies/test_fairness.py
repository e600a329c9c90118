"""No kind of batch is lost for good: what is skipped depends on the data.

A policy that loses one step in fifty may lose the same batches each time.
"""

from helpers.benchmark import load_benchmark
import numpy as np
import pytest

import optax_lossscale as ols

POLICY, DYNAMIC = ols.HeadroomLossScale(), ols.DynamicLossScale()


@pytest.fixture(scope="module")
def shares():
  """The share of the large steps that each policy loses, and of all."""
  fairness = load_benchmark("policies/fairness")
  patterns = fairness.make_patterns(40_000)
  return {
    policy: {
      name: (share, lost)
      for name, share, lost in fairness.measure(policy, patterns)
    }
    for policy in (POLICY, DYNAMIC)
  }


@pytest.mark.parametrize("kind", ["pairs", "triples", "fives"])
def test_rows_of_large_gradients_are_learned_however_seldom_they_come(
  shares, kind
):
  of_kind = {k: v for k, v in shares[POLICY].items() if k.startswith(kind)}
  assert len(of_kind) == 9
  assert max(share for share, _ in of_kind.values()) < 0.1


@pytest.mark.parametrize("kind", ["turns", "bursts", "1 of 300"])
def test_large_gradients_that_come_now_and_then_are_learned(shares, kind):
  of_kind = {k: v for k, v in shares[POLICY].items() if k.startswith(kind)}
  assert of_kind
  assert max(share for share, _ in of_kind.values()) < 0.15


@pytest.mark.parametrize("kind", ["white noise", "Cauchy", "Student"])
def test_of_heavy_tails_hardly_more_is_lost_than_with_the_dynamic_rule(
  shares, kind
):
  (name,) = [x for x in shares[POLICY] if x.startswith(kind)]
  assert shares[POLICY][name][1] <= 2 * shares[DYNAMIC][name][1]


@pytest.mark.parametrize("zeros", [10, 50])
def test_what_follows_as_many_zeros_each_time_does_not_meet_one_guess_for_ever(
  zeros,
):
  at = np.arange(20_000)
  is_large = at % 100 == 0
  run = np.where(at % 100 >= 100 - zeros, -np.inf, -14.0 + 16 * is_large)
  adversary = load_benchmark("policies/adversary")
  lost, _ = adversary.find_lost(POLICY, run[None])
  assert lost[0][is_large].mean() < 0.4


@pytest.mark.slow
def test_a_rare_domain_is_learned_as_it_is_with_the_dynamic_rule():
  training = load_benchmark("policies/rare_training")
  for mixture in training.MIXTURES:
    found = training.train_all(mixture)
    assert np.min(found["headroom"]["accuracy_on_the_rare"]) > 0.9
    assert np.min(found["float32"]["accuracy_on_the_rare"]) > 0.9
