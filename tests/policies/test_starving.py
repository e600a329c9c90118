"""HeadroomLossScale starves on no run.

Each of these runs made an earlier form of the rule lose all steps, or long rows
of them. `benchmarks/policies` has simulations of many other kinds.
"""

from typing import NamedTuple

from helpers.benchmark import load_benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale._policies import _log2_scales

simulation = load_benchmark("policies/simulation")

# Binary logarithms of the largest gradient of a step without any.
NAN, ZERO = np.nan, -np.inf
LEVELS = -60.0, -40, -20, -14, 0, 10
PERIODS = [2, 10, 40, 64, 97, 150, 244, 300]


class Bounds(NamedTuple):
  """Runs, and how many gradients may be lost in each of them."""

  runs: np.ndarray
  lost: float = np.inf
  in_a_row: float = np.inf


def start_with(start, levels):
  """A run of each level, after steps without gradients."""
  runs = np.repeat(np.float64(levels)[:, None], 4_000, axis=1)
  runs[:, : len(start)] = start
  return runs


def every(period, level, others=ZERO, steps=4_000, nans=0):
  """For each period, a run with a level in each step of this period."""
  at, periods = np.arange(steps), np.atleast_1d(period)[:, None]
  runs = np.where(at % periods == periods - 1, level, others)
  return np.where(at < nans, NAN, runs)


def drop_or_rise(before):
  """A run from a level to each of some others."""
  levels = np.arange(-100, 38, 20)[:, None]
  return np.where(np.arange(800) < 300, before, levels)


def spikes_after_nans():
  at, runs = np.arange(8_000), every(57, 0.0, -20.0, 8_000)
  return np.where(at < 190, np.where(at % 10 == 3, NAN, 0.0), runs)


def change_of_sparse():
  """Gradients in every second step, whose level changes after an eighth."""
  steps = np.arange(800)
  levels = np.where(steps < 100, -14, [[-60], [-50], [0], [20]])
  return np.where(steps % 2 == 0, levels, ZERO)


RUNS = {
  "a NaN, then any gradients": Bounds(
    start_with([NAN], [-24, -40, -100]), lost=10
  ),
  "NaNs and zeros, then any gradients": Bounds(
    start_with([NAN, ZERO, NAN, NAN, ZERO] * 40, LEVELS), lost=39
  ),
  "10 NaNs, then spikes": Bounds(
    every(range(5, 301, 40), 0.0, -20.0, nans=10), lost=45, in_a_row=20
  ),
  "NaNs, then a drop with spikes": Bounds(spikes_after_nans(), lost=50),
  "spikes of 20 binades": Bounds(every([9, 20, 33, 60], 6, -14), lost=16 + 1),
  # No scale fits the spikes and the rest.
  "spikes of 28 binades": Bounds(
    every(250, 14, -14), lost=4_000 / 250, in_a_row=1
  ),
  "sparse gradients": Bounds(every(PERIODS, -14.0, steps=8_000), lost=10),
  "a drop or rise": Bounds(drop_or_rise(-14), in_a_row=128),
  "a drop or rise, and NaNs": Bounds(
    np.where(np.arange(800) % 3 == 0, NAN, drop_or_rise(10)), in_a_row=128
  ),
  "a change of sparse levels": Bounds(change_of_sparse(), in_a_row=512),
}


def find_longest_rows(runs, lost):
  """The longest row of informative steps that are lost, for each run."""
  rows = []
  for is_lost, counts in zip(lost, np.isfinite(runs), strict=True):
    kept = np.flatnonzero(~is_lost[counts])
    edges = np.concatenate([[-1], kept, [counts.sum()]])
    rows.append(np.diff(edges).max() - 1)
  return np.array(rows)


def pad(runs):
  """Add zeros to runs and steps, so that all tests share a program."""
  padded = np.full((8, 8_000), ZERO)
  padded[: runs.shape[0], : runs.shape[1]] = runs
  return padded


@pytest.mark.parametrize("name", RUNS)
def test_headroom_loses_few_gradients_and_few_in_a_row(name):
  bounds = RUNS[name]
  runs = pad(bounds.runs)
  trace = simulation.simulate_runs(ols.HeadroomLossScale(), runs)
  lost = simulation.find_lost(runs, trace)
  assert lost.sum(axis=1).max() <= bounds.lost
  assert find_longest_rows(runs, lost).max() <= bounds.in_a_row


# A gradient that is finite although it is, times the scale, above the top was
# never in half precision. It shows that this scale held, and no more.


@jax.jit
def run_with_scalars(log2_init_scale, log2_net, log2_scalar):
  """The log2 scale of each step, and whether the network lost it."""
  policy = ols.HeadroomLossScale(init_scale=jnp.exp2(log2_init_scale))

  def step(state, log2_amaxes):
    net, scalar = jnp.exp2(log2_amaxes)
    held = (net * state.loss_scale).astype(jnp.float16).astype(jnp.float32)
    finite = jnp.isfinite(held) & jnp.isfinite(scalar * state.loss_scale)
    amax = jnp.maximum(held / state.loss_scale, scalar)
    after = policy.adjust(state, finite, grads_amax=amax)
    return after, (jnp.log2(state.loss_scale), ~(finite & (held > 0)))

  steps = jnp.stack([log2_net, log2_scalar], -1)
  return jax.lax.scan(step, policy.init(), steps)[1]


AT = np.arange(40_000)
NET, SCALAR = np.full(AT.shape, -14.0), np.full(AT.shape, 41.0)


def insert_nans(where):
  return [np.where(where, NAN, x) for x in (NET, SCALAR)]


# The log2 of the first scale, the network, the scalar, and the lowest scale
# after 100 steps and at the end.
SCALARS = {
  "always": (15, NET, SCALAR, 20, 20),
  "by turns": (15, NET, np.where(AT // 100 % 2 == 0, 41.0, -20.0), 20, 20),
  "the network rises": (15, np.where(AT < 3_000, NET, 6.0), SCALAR, -24, 2),
  "rare NaNs": (15, *insert_nans((AT % 100 == 0) & (AT < 20_000)), -10, 5),
  "3 NaNs, low start": (-24, *insert_nans(AT < 3), 20, 20),
  "40 NaNs, high start": (60, *insert_nans(AT < 40), 20, 20),
}


@pytest.mark.parametrize("name", SCALARS)
def test_gradients_above_float16_lower_the_scale_only_by_overflows(name):
  start, net, scalar, lowest, last = SCALARS[name]
  log2_scale, lost = map(np.asarray, run_with_scalars(start, net, scalar))
  # It is tried again after each 4,096 steps.
  assert (lost & np.isfinite(net)).sum() <= 20 + AT.size / 4_096
  assert log2_scale[100:].min() >= lowest
  assert last <= log2_scale[-1] < 16 - net[-1]


# One guess lies in each 16 binades. For whichever it is, and for each n, this
# counts the gradients until it is tried where there are some.


@jax.jit
def find_guesses(steps):
  """Whether each of these steps of a search is a guess, and at which scale."""
  args = steps, jnp.int32(1), jnp.int32(999), (-24, 126)
  is_guess, exponents = _log2_scales.propose_log2_scale(*args)
  return is_guess & (exponents != 999), exponents


ALL = set(range(-24, 127, 16))


def test_each_scale_is_tried_before_512_sparse_gradients_are_lost():
  for period in range(1, 1001):
    for wait in (8, min(2 * period, 512)):
      quiet = np.arange(1, 513, dtype=np.int32) * period - 1
      is_guess, tried = map(np.asarray, find_guesses(quiet - wait))
      assert set(tried[is_guess].tolist()) == ALL, period


def test_each_scale_is_tried_in_the_first_40_steps_of_a_search_and_in_any_80():
  steps = np.arange(1104, dtype=np.int32)
  is_guess, tried = map(np.asarray, find_guesses(steps))
  assert set(tried[:40][is_guess[:40]].tolist()) == ALL
  for start in range(1024):
    of_80 = slice(start, start + 80)
    assert set(tried[of_80][is_guess[of_80]].tolist()) == ALL, start
