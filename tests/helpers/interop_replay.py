"""Replaying recorded trajectories with our policies, and comparing."""

import dataclasses
import functools
import itertools
import json

from interop.golden import record_common as common
import jax
import numpy as np

LOW, HIGH = 2.0**-126, 2.0**126


def load(name):
  return json.loads((common.HERE / f"{name}.json").read_text())


@functools.partial(jax.jit, static_argnums=0)
def scan_policy(policy, state, finite):
  def body(state, step):
    state = policy.adjust(state, step)
    return state, (state.loss_scale, state.finite_count, state.last_finite)

  return jax.lax.scan(body, state, finite)[1]


def replay(policy, state, steps):
  """Ours, in one compiled scan; padded, so that strings share it."""
  finite = np.array([step == "F" for step in steps])
  length = max(128, 1 << (len(steps) - 1).bit_length())
  padded = np.concatenate([finite, np.zeros(length - len(finite), bool)])
  # The first scale does not act on the steps; equal rules share a compilation.
  if hasattr(policy, "init_scale"):
    init_scale = min(
      max(2.0**15, policy.min_scale), getattr(policy, "max_scale", HIGH)
    )
    policy = dataclasses.replace(policy, init_scale=init_scale)
  return [
    np.asarray(x)[: len(steps)] for x in scan_policy(policy, state, padded)
  ]


def assert_same_trajectory(expected, expected_counts, actual, may_leave_range):
  scales = np.array(
    [common.decode_scale(x) for x in common.decode_runs(expected["scale"])]
  )
  outcomes = common.unpack(expected["taken"])
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


def decode_counters(encoded):
  return list(itertools.accumulate(common.decode_runs(encoded)))
