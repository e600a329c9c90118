"""Replaying recorded trajectories with our policies, and comparing."""

import json

from interop.golden import encoding
import numpy as np

from helpers.policy_models import run_policy

LOW, HIGH = 2.0**-126, 2.0**126


def load(name):
  return json.loads((encoding.HERE / f"{name}.json").read_text())


def replay(policy, state, steps):
  """The scale, the count and whether it was applied, after each step."""
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


def is_in_range(scale):
  """Whether float32 holds the scale and its reciprocal as normal numbers."""
  return (scale >= LOW) & (scale <= HIGH)
