"""Simulate what a policy makes of the largest gradient of each step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOP = np.log2(65504)
# The scale of each step in log2, whether the step was finite, and whether
# float16 held anything but zeros; each has the shape (run, step).
Trace = list[np.ndarray]


def simulate_runs(
  policy: Any, log2_amax: np.ndarray, on_the_way: Any = 0.0
) -> Trace:
  """Return the trace of runs.

  Args:
    policy: the policy.
    log2_amax: the largest gradient of each step, with the shape (run, step);
      -inf for zeros, NaN for NaNs.
    on_the_way: the binades by which the backward pass exceeds it, one number or
      one for each run.
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
