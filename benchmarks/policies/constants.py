"""Ablates the constants of the headroom rule: one at a time, off or doubled.

Judges the rule by the steps it loses: in random genomes of all categories, the
large gradients of fairness.py, where values on the way are larger; and by how
far under the best scale NaNs push it. Writes its part of policies.json, and
prints the table of README.md.

  python benchmarks/policies/constants.py  # five minutes
"""

import json
import pathlib
from unittest import mock

import adversary
import fairness
import genomes
import numpy as np
import policies

import optax_lossscale as ols
from optax_lossscale._policies import _headroom, _search

FILE = pathlib.Path(__file__).parent / "policies.json"
GENOMES = 180  # of each category
STEPS = 40_000  # of the patterns and the processes
POLICY = ols.HeadroomLossScale()


def make_limited_log2_scales(binades):
  """Another lowest limit: so far below the target, or the lowest of all."""
  usual = _headroom.HeadroomLossScale._compute_log2_scales

  def compute_log2_scales(self, amax_history):
    has_history, target, _ = usual(self, amax_history)
    low, _ = self._log2_scale_bounds()
    lowest = low if binades is None else target - binades
    return has_history, target, lowest

  return (
    _headroom.HeadroomLossScale,
    "_compute_log2_scales",
    compute_log2_scales,
  )


# The changes by name: the module, the constant, and its other value.
CHANGES = {
  "as it is": None,
  "window of 1, for 8": ols.HeadroomLossScale(amax_history_len=1),
  "window of 16": ols.HeadroomLossScale(amax_history_len=16),
  "target -1, for -4": ols.HeadroomLossScale(margin=1),
  "target -8": ols.HeadroomLossScale(margin=8),
  "a stride without bound, for 8": (_headroom, "_MAX_LOG2_CHANGE", 256),
  "a stride of 16": (_headroom, "_MAX_LOG2_CHANGE", 16),
  "limits as low as there are": make_limited_log2_scales(None),
  "no limit more than 12 below": make_limited_log2_scales(12),
  "never tried again, for 4,096 steps": (
    _headroom,
    "_RETRY_INTERVAL",
    2**30,
  ),
  "tried again after 8,192": (_headroom, "_RETRY_INTERVAL", 8_192),
  "after 2,048": (_headroom, "_RETRY_INTERVAL", 2_048),
  "by one binade each time": (_headroom, "_MAX_RETRY_DOUBLINGS", 1),
  "by up to 4 binades, for 8": (_headroom, "_MAX_RETRY_DOUBLINGS", 3),
  "up to 16": (_headroom, "_MAX_RETRY_DOUBLINGS", 5),
  "no search, for one after 8": (_search, "MIN_SEARCH_DELAY", 2**30),
  "a search after 16": (_search, "MIN_SEARCH_DELAY", 16),
  "a longest wait of 8, for 512": (_search, "_MAX_SEARCH_DELAY", 8),
  "a longest wait of 1,024": (_search, "_MAX_SEARCH_DELAY", 1_024),
  "a guess in 2 steps, for 4": (_search, "_SEARCH_PERIOD", 2),
  "a guess in 8 steps": (_search, "_SEARCH_PERIOD", 8),
  "guesses 32 binades apart, for 16": (_search, "_PROPOSAL_STRIDE", 32),
  "guesses in order for ever, for 16": (
    _search,
    "_PROPOSALS_PER_SHUFFLE",
    2**30,
  ),
  "guesses in order for 32": (_search, "_PROPOSALS_PER_SHUFFLE", 32),
}


def main():
  data = make_data()
  found = {}
  for name, change in CHANGES.items():
    found[name] = judge_changed(change, data)
    print(name, found[name], flush=True)
  results = json.loads(FILE.read_text())
  results["constants"] = found
  FILE.write_text(json.dumps(results, indent=1) + "\n")
  print_table(found)


def make_data():
  """The genomes, patterns and processes by which all are judged."""
  drawn = {}
  for name, kind in genomes.CATEGORIES.items():
    rng = np.random.default_rng(0)
    drawn[name] = [genomes.draw(rng, kind) for _ in range(GENOMES)]
  at = np.arange(2 * STEPS)
  fall = np.where(at < STEPS, -14.0, -24.0)
  changes = {
    "6 on the way": policies.Process(np.full((1, at.size), -14.0), None, 6),
    "a NaN every 500": policies.Process(
      np.where(at % 500 == 499, np.nan, -14.0)[None]
    ),
    "6 on the way, and a fall by 10": policies.Process(fall[None], None, 6),
  }
  return drawn, fairness.make_patterns(STEPS), changes


def judge_changed(change, data):
  """The figures with one change."""
  policies.forget_compiled()
  if not isinstance(change, tuple):
    return judge(change or POLICY, data)
  module, name, value = change
  with mock.patch.object(module, name, value):
    return judge(POLICY, data)


def judge(policy, data):
  """Return the figures of a policy. Lower is better, except for shares."""
  drawn, patterns, processes = data
  of_each = [
    adversary.measure_genomes(policy, category, found)
    for category, found in drawn.items()
  ]
  shares = {
    name: share for name, share, _ in fairness.measure(policy, patterns)
  }
  traces = {
    name: policies.simulate_one(policy, process)
    for name, process in processes.items()
  }
  (log2_nan,), _, _ = traces["a NaN every 500"]
  (log2_fall,), _, _ = traces["6 on the way, and a fall by 10"]
  # After the fall, 34 is the best.
  near = np.flatnonzero(log2_fall[STEPS:] >= 34 - policies.NEAR)
  return {
    "lost": sum(x.lost for found in of_each for x in found),
    "longest_row": max(x.longest_row for found in of_each for x in found),
    "share_of_rows": max(shares[x] for x in shares if "every" in x),
    "share_of_1_in_300": shares["1 of 300, 2**7"],
    "white_noise": shares["white noise of 3"],
    "on_the_way": int((~traces["6 on the way"][1]).sum()),
    "binades_under_with_nans": float(np.median(policies.TOP + 14 - log2_nan)),
    "steps_to_come_back": int(near[0]) if near.size else None,
  }


def print_table(found):
  columns = list(found["as it is"])
  print(" | ".join(["| change", *(x.replace("_", " ") for x in columns)]), "|")
  print("|---|" + "--:|" * len(columns))
  for name, row in found.items():
    cells = [
      "never"
      if row[x] is None
      else f"{row[x]:.1%}"
      if x.startswith(("share", "white"))
      else f"{row[x]:,.5g}"
      if isinstance(row[x], float)
      else f"{row[x]:,}"
      for x in columns
    ]
    print(" | ".join([f"| {name}", *cells]), "|")


if __name__ == "__main__":
  main()
