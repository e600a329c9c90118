"""The policies in plain Python, whose floats are exact where these are used.

Each is a function from the scale, what the policy remembers and a step to the
scale and what it remembers then. Nothing here is shared with the package.
"""

import collections
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols


class Window(NamedTuple):
  """What HeadroomLossScale remembers."""

  amaxes: tuple  # the oldest first
  growth: int  # in binades


class Averages(NamedTuple):
  """What LogMaxLossScale remembers."""

  mean: float = 0.0
  mean_weight: float = 0.0
  slow_mean: float = 0.0
  variance: float = 0.0
  weight: float = 0.0


class Model:
  """The counts and the scale of a state, and what the policy remembers."""

  def __init__(self, policy):
    self.policy, self.memory = policy, fresh(policy)
    self.scale = float(policy.init().loss_scale)
    self.count = self.in_a_row = self.total = 0

  def step(self, finite, amax=0.0, hint=None):
    """Moves on by a step; where two scales are right, the hint is taken."""
    self.count = self.count + 1 if finite else 0
    self.in_a_row = 0 if finite else self.in_a_row + 1
    self.total += not finite
    args = self.policy, self.scale, self.memory
    if isinstance(self.policy, ols.FixedLossScale):
      return
    if isinstance(self.policy, ols.DynamicLossScale):
      right, self.memory, restarts = dynamic(*args, self.count, finite)
    elif isinstance(self.policy, ols.HeadroomLossScale):
      right, self.memory = headroom(*args, finite, amax)
      restarts = right != self.scale
    else:
      right, self.memory = logmax(*args, finite, amax)
      right = hint if hint in right else min(right)
      restarts = right != self.scale
    self.scale = right
    self.count = 0 if restarts else self.count

  def switch(self, policy):
    """Goes on by another policy, and with its memory if that fits."""
    own = fresh(policy)
    if own is not None and type(own) is not type(self.memory):
      self.memory = own
    self.policy = policy

  def set_scale(self, value):
    self.scale, self.count = value, 0


def fresh(policy):
  """What a policy remembers before the first step."""
  if isinstance(policy, ols.HeadroomLossScale):
    return Window((0.0,) * policy.window, 0)
  if isinstance(policy, ols.LogMaxLossScale):
    return Averages()
  if isinstance(policy, ols.DynamicLossScale) and policy.hysteresis > 1:
    return policy.hysteresis
  return None


def dynamic(policy, scale, left, count, finite):
  """DynamicLossScale; count is the finite steps in a row, this one included.

  Returns the scale, the hysteresis left, and whether it was time to grow.
  """
  p, factor = policy, 1.0
  grows = finite and count >= p.growth_interval
  memory, left = left, min(left, p.hysteresis) if p.hysteresis > 1 else 1
  if finite:
    if grows:
      factor = p.growth_factor
    if grows or p.hysteresis_refill != "growth":
      left = p.hysteresis
  else:
    left = max(left - 1, 0)
    if left == 0:
      factor = p.backoff_factor
      if p.hysteresis_refill == "backoff":
        left = p.hysteresis
  with np.errstate(over="ignore", under="ignore"):
    scale = np.float32(scale) * np.float32(factor)
  scale = np.clip(scale, np.float32(p.min_scale), np.float32(p.max_scale))
  # Without hysteresis, what another policy remembers stays for it.
  return float(scale), left if p.hysteresis > 1 else memory, grows


def headroom(policy, scale, window, finite, amax):
  """HeadroomLossScale; returns the scale and the window."""
  exponent = floor_log2(scale)
  target = top(policy) * 2.0**policy.target
  amaxes = collections.deque(window.amaxes, len(window.amaxes))
  if finite:
    if math.isfinite(amax):
      amaxes.append(amax)
    growth = _room(max(amaxes), exponent, target)
    new = exponent + (growth if growth != 1 else 0)
  elif window.growth:
    new = exponent - window.growth
    if target / 2.0**new < 2.0**128:  # float32 ends there.
      amaxes.append(target / 2.0**new)
  else:
    new = exponent - 2
  new_scale = bounded(policy, new)
  growth = max(floor_log2(new_scale) - exponent, 0) if finite else 0
  return new_scale, Window(tuple(amaxes), growth)


def _room(amax, exponent, target):
  """The most binades, 8 at most, that the scale can grow under the target."""
  if amax == 0:
    return 8
  growth = 0
  while amax * 2.0 ** (exponent + growth) > target:
    growth -= 1
  while growth < 8 and amax * 2.0 ** (exponent + growth + 1) <= target:
    growth += 1
  return growth


def logmax(policy, scale, averages, finite, amax):
  """LogMaxLossScale; returns the scales that are right, and the averages.

  There are two where the logarithm is an integer but for rounding.
  """
  exponent = floor_log2(scale)
  log2_top = math.log2(top(policy))
  if finite and amax > 0:
    averages = _averaged(policy, averages, math.log2(amax))
  elif not finite and averages.mean_weight > 0:
    at_least = max(log2_top - exponent, averages.mean)
    averages = _averaged(policy, averages, at_least)
  if averages.mean_weight == 0:
    best = {2**12}
  else:
    deviation = math.sqrt(averages.variance)
    best = log2_top - (averages.mean + policy.deviations * deviation)
    best = {math.floor(best - 1e-3), math.floor(best + 1e-3)}
  if not finite:
    best = {min(b, exponent - 1) for b in best}
  elif amax == 0:
    best = {exponent + 1}
  return {bounded(policy, b) for b in best}, averages


def _averaged(policy, averages, x):
  decay, slow_decay = policy.mean_decay, policy.deviation_decay
  mean_weight = decay * averages.mean_weight + (1 - decay)
  weight = slow_decay * averages.weight + (1 - slow_decay)
  mean_rate, rate = (1 - decay) / mean_weight, (1 - slow_decay) / weight
  error = x - averages.slow_mean
  return Averages(
    mean=averages.mean + mean_rate * (x - averages.mean),
    mean_weight=mean_weight,
    slow_mean=averages.slow_mean + rate * error,
    variance=(1 - rate) * (averages.variance + rate * error**2),
    weight=weight,
  )


def floor_log2(x):
  return math.frexp(x)[1] - 1


def top(policy):
  return float(jnp.finfo(policy.dtype).max)


def bounded(policy, exponent):
  return min(max(2.0**exponent, policy.min_scale), policy.max_scale)
