"""Replaying recorded trajectories with our policies, and comparing."""

import dataclasses
import json

from interop.golden import encoding
import numpy as np

from helpers.policy_models import run_policy
import optax_lossscale as ols

LOW, HIGH = 2.0**-126, 2.0**126


def load(name):
  return json.loads((encoding.HERE / f"{name}.json").read_text())


def replay(policy, state, steps):
  """The scale, the count and whether it was applied, after each step."""
  if not isinstance(policy, ols.DynamicLossScale | ols.FixedLossScale):
    # The first scale does not act on the steps; equal rules share a program.
    init_scale = min(
      max(2.0**15, policy.min_scale), getattr(policy, "max_scale", HIGH)
    )
    policy = dataclasses.replace(policy, init_scale=init_scale)
  states = run_policy(policy, [step == "F" for step in steps], state)
  return states.loss_scale, states.finite_count, states.last_finite


def assert_same_trajectory(expected, expected_counts, actual, may_leave_range):
  scales = np.array(
    [encoding.decode_scale(x) for x in encoding.decode_runs(expected["scale"])]
  )
  outcomes = encoding.unpack(expected["taken"])
  our_scales, our_counts, our_applied = actual
  in_range_mask = is_in_range(scales)
  end = len(scales) if in_range_mask.all() else int(np.argmin(in_range_mask))
  assert end == len(scales) or may_leave_range
  np.testing.assert_array_equal(our_scales[:end], scales[:end])
  np.testing.assert_array_equal(our_counts[:end], expected_counts[:end])
  applied = np.array([x == "A" for x in outcomes])[:end]
  np.testing.assert_array_equal(our_applied[:end], applied)
  assert is_in_range(our_scales).all()
  if outcomes.endswith("R"):  # It raised at its floor; ours skips, and stays.
    assert our_scales[len(scales)] == scales[-1]
    assert not our_applied[len(scales)]


def is_in_range(scale):
  """Whether float32 holds the scale and its reciprocal as normal numbers."""
  return (scale >= LOW) & (scale <= HIGH)
