"""Simulate what a policy makes of the largest gradient of each step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SEEDS = 5
LEVEL = -14  # log2 of the largest gradient, on average
TOP = np.log2(65504)
NEAR = 6  # binades: a scale this far under the best scale is still near it
# The scale of each step in log2, whether the step was finite, and whether
# float16 held anything but zeros; each has the shape (run, step).
Trace = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Process:
  """The largest gradient of each step, for any scale."""

  log2_amax: np.ndarray  # (seed, step); -inf for zeros, NaN for NaNs
  level: np.ndarray | None = None  # without spikes, zeros and NaNs
  on_the_way: float = 0  # binades by which the backward pass exceeds it
  log2_init_scale: int = 15  # of policies that have one
  change: int | None = None  # the step of a change
  is_large: np.ndarray | None = None  # the steps whose lost share counts


def make_processes(steps: int) -> dict[str, Process]:
  """Return processes by name."""
  rng = np.random.default_rng(0)
  calm, noise = make_calm(rng, steps)
  at, shape = np.arange(steps), calm.shape
  half, past_half = steps // 2, np.arange(steps) >= steps // 2
  warm = at < 100
  spikes = rng.exponential(2, shape) * (rng.random(shape) < 1e-3)
  some = rng.random(shape) < 0.05

  def every(n):
    return at % n == n - 1

  def keep_where(mask, x=calm):
    return Process(np.where(mask, x, -np.inf), level=x)

  def make_changing(by):
    x = calm + by
    return Process(x, change=half if np.ptp(by) == abs(by).max() else None)

  def with_nan(mask, x=calm, change=None):
    return Process(np.where(mask, np.nan, x), level=x, change=change)

  slow = np.linspace(0, 1, steps)
  burst = (at >= half) & (at < half + 40)
  return {
    "calm": Process(calm),
    "spiky": Process(calm + spikes, level=calm),
    "falls slowly by 14": Process(calm - 14 * slow),
    "rises slowly by 14": Process(calm + 14 * slow),
    **{
      f"jumps by {k}": make_changing(k * past_half) for k in (10, 14, -10, -14)
    },
    "40 NaNs": with_nan(burst, change=half + 40),
    **{f"sparse: every {n}": keep_where(every(n)) for n in (2, 8, 40)},
    "sparse: random 5%": keep_where(some),
    **{f"100, then every {n}": keep_where(every(n) | warm) for n in (2, 8, 40)},
    "100, then random 5%": keep_where(some | warm),
    "20 zeros first": keep_where(at >= 20),
    "2**7 more every 40": Process(calm + 7 * every(40), level=calm),
    "2**7 more every 400": Process(calm + 7 * every(400), level=calm),
    "2**6 more on the way": Process(calm, level=calm + 6, on_the_way=6),
    "a NaN every 500": with_nan(every(500)),
    "a NaN every 500, random": with_nan(rng.random(shape) < 1 / 500),
    "a NaN every 100": with_nan(every(100)),
    "white noise of 2": Process(LEVEL + 4 * noise, LEVEL + 0 * noise),
    "starts at 2**0": Process(calm, log2_init_scale=0),
    "starts at 2**60": Process(calm, log2_init_scale=60),
    "every 40, from 2**60": dataclasses.replace(
      keep_where(every(40)), log2_init_scale=60
    ),
    "10 NaNs first": with_nan(at < 10),
    "NaNs and zeros first": Process(
      np.where(at < 400, np.where(every(3), np.nan, -np.inf), calm - 6),
      level=calm - 6,
    ),
    "every 40, jumps by 10": keep_where(every(40), calm + 10 * past_half),
    "every 40, jumps by -10": keep_where(every(40), calm - 10 * past_half),
    "10,000 zeros, by turns": keep_where(at // 10_000 % 2 == 0),
    "jumps by -30": make_changing(-30 * past_half),
  }


def make_patterns(steps: int) -> dict[str, Process]:
  """Return mixtures of usual gradients with large ones, by name.

  The data decide which steps are skipped, so a policy that loses few steps may
  lose the same batches every time.
  """
  rng = np.random.default_rng(0)
  calm, noise = make_calm(rng, steps)
  at = np.broadcast_to(np.arange(steps), calm.shape)

  def mix(binades, is_large):
    return Process(calm + binades * is_large, is_large=is_large)

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
  return (
    rows
    | others
    | {
      name: Process(LEVEL + x, is_large=x > np.quantile(x, 0.99))
      for name, x in tails.items()
    }
  )


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


def simulate(policy: Any, processes: dict[str, Process]) -> dict[str, Trace]:
  """Return the trace of each process under a policy."""
  traces = {}
  for start in {process.log2_init_scale for process in processes.values()}:
    names = [n for n, p in processes.items() if p.log2_init_scale == start]
    trace = simulate_runs(
      _replace_init_scale(policy, 2.0**start),
      np.concatenate([processes[name].log2_amax for name in names]),
      np.repeat([processes[name].on_the_way for name in names], SEEDS),
    )
    parts = zip(*(np.split(x, len(names)) for x in trace), strict=True)
    traces |= dict(zip(names, parts, strict=True))
  return {name: traces[name] for name in processes}


def _replace_init_scale(policy, scale):
  has_start = hasattr(policy, "init_scale")
  return dataclasses.replace(policy, init_scale=scale) if has_start else policy


def simulate_runs(
  policy: Any, log2_amax: np.ndarray, on_the_way: Any = 0.0
) -> Trace:
  """Return the trace of runs.

  Args:
    policy: the policy.
    log2_amax: as in ``Process``, with the shape (run, step).
    on_the_way: as in ``Process``, one number or one for each run.
  """
  on_the_way = np.broadcast_to(np.float32(on_the_way), len(log2_amax))
  trace = _compile(policy)(np.asarray(log2_amax, np.float32), on_the_way)
  return [np.asarray(x) for x in trace]


@functools.cache
def _compile(policy):
  def run(log2_amax, on_the_way):
    def step(state, log2_amax):
      scale = state.loss_scale
      # float16 rounds 65520 to inf and 2**-25 to zero.
      held = jnp.exp2(log2_amax) * scale
      finite = held * jnp.exp2(on_the_way) < 65520
      held = held.astype(jnp.float16).astype(jnp.float32)
      after = policy.adjust(state, finite, grads_amax=held / scale)
      return after, (jnp.log2(scale), finite, held > 0)

    return jax.lax.scan(step, policy.init(), log2_amax)[1]

  return jax.jit(jax.vmap(run))


def find_lost(log2_amax: np.ndarray, trace: Trace) -> np.ndarray:
  """Return the informative steps that were lost.

  A step is lost if it is skipped, or if float16 made zeros of all of its
  gradients. Zeros and NaNs that no scale changes are not informative.
  """
  _, finite, held = trace
  return np.isfinite(log2_amax) & ~(finite & held)
