"""The policies in plain Python, whose floats are exact where these are used.

Each is a function from the scale, what the policy remembers and a step to the
scale and what it remembers then. Nothing here is shared with the package.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols


class Learned(NamedTuple):
  """What HeadroomLossScale remembers."""

  amaxes: tuple = ()  # the oldest first; as many as the window holds
  caution: int = 0
  credit: int = 0
  zeros: int = 0  # steps in a row


class Model:
  """The counts and the scale of a state, and what the policy remembers."""

  def __init__(self, policy):
    self.policy, self.memory = policy, fresh(policy)
    self.scale = float(policy.init().loss_scale)
    self.count = self.in_a_row = self.total = 0

  def step(self, finite, amax=0.0):
    """Moves on by a step."""
    self.count = self.count + 1 if finite else 0
    self.in_a_row = 0 if finite else self.in_a_row + 1
    self.total += not finite
    args = self.policy, self.scale, self.memory
    if isinstance(self.policy, ols.FixedLossScale):
      return
    if isinstance(self.policy, ols.DynamicLossScale):
      right, self.memory, restarts = dynamic(*args, self.count, finite)
    else:
      right, self.memory = headroom(*args, self.in_a_row, amax)
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
    return Learned()
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


def headroom(policy, scale, memory, in_a_row, amax):
  """HeadroomLossScale; in_a_row is the overflows in a row, 0 if finite.

  Returns the scale, and what is remembered.
  """
  p, exponent = policy, floor_log2(scale)
  amaxes, caution, credit, zeros = memory
  if in_a_row:
    zeros = 0
    if in_a_row == 1:
      if credit < 256:
        caution = caution + 1 if amaxes else _next_guess(p, scale, caution)
      credit = max(credit - 256, 0)
    tiny = float(jnp.finfo(p.dtype).smallest_normal)
    is_lowest = exponent <= floor_log2(p.min_scale)
    if amaxes and (is_lowest or max(amaxes) * scale < tiny):
      caution = 0
  elif 2.0**-126 <= amax < math.inf:
    credit = 0 if amax * scale > top(p) / 2 else min(credit + 1, 4096)
    if credit == 4096 and caution:
      caution, credit = caution - 1, 0
    if not amaxes:
      caution = 0
    amaxes = (*amaxes, amax)[-p.window :]
    zeros = 0
  else:
    zeros = (zeros + 1) % 61
    if not zeros and not amaxes and caution:
      caution = _next_guess(p, scale, caution)
    elif not zeros and caution > 8:
      caution = max(caution // 2, 8)

  if amaxes:
    evidence = _best_exponent(max(amaxes), top(p) * 2.0**p.target)
  else:
    evidence = floor_log2(p.init_scale if caution else p.max_scale)
  low, high = floor_log2(p.min_scale), floor_log2(p.max_scale)
  new = min(max(evidence, low), high) - caution
  if in_a_row:
    new = min(new, exponent - 2 ** min(in_a_row - 1, 4))
  else:
    new = min(new, exponent + 8)
  return 2.0 ** min(max(new, low), high), Learned(
    amaxes, caution, credit, zeros
  )


def _next_guess(policy, scale, caution):
  if not caution or scale <= policy.min_scale:
    return 1
  return caution + 16


def _best_exponent(amax, target):
  """The largest k with amax * 2**k at most the target."""
  k = math.floor(math.log2(target) - math.log2(amax))
  while amax * 2.0**k > target:
    k -= 1
  while amax * 2.0 ** (k + 1) <= target:
    k += 1
  return k


def floor_log2(x):
  return math.frexp(x)[1] - 1


def top(policy):
  return float(jnp.finfo(policy.dtype).max)
