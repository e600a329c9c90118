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

  ceiling: int = 128
  credit: int = 0
  quiet: int = 0  # steps in a row
  patience: int = 0
  amaxes: tuple = ()  # the newest first; as many as the window holds


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
  low, high = floor_log2(p.min_scale), floor_log2(p.max_scale)
  ceiling, credit, quiet, patience, amaxes = memory
  was_guess = next_guess(p, memory) is not None
  has_grads = not in_a_row and 2.0**-126 <= amax < math.inf
  if has_grads:
    if quiet >= 48 + patience or not amaxes:
      amaxes, ceiling = (), 128
    amaxes = (amax, *amaxes)[: p.window]
    patience = min(patience - patience // 16 + quiet // 4, 1024)
    quiet = 0
    credit = 0 if amax * scale > top(p) / 2 else min(credit + 1, 4096)
    below = max(evidence(p, amaxes) - memory.ceiling, 0)
    if memory.ceiling < 128 and credit >= 4096 // 2 ** (below // 6):
      ceiling, credit = min(ceiling + 1, 128), 0
    if evidence(p, amaxes) - ceiling > deepest(p):
      ceiling = 128
  else:
    quiet += 1
    if in_a_row and not amaxes:
      quiet = max(quiet, 48)
    elif in_a_row:
      if in_a_row == 1 and not was_guess:
        if credit < 256:
          ceiling = min(evidence(p, amaxes), ceiling) - 1
        credit = max(credit - 256, 0)
      if exponent <= max(low, evidence(p, amaxes) - deepest(p)):
        ceiling = 128

  memory = Learned(ceiling, credit, quiet, patience, amaxes)
  highest = min(evidence(p, amaxes) if amaxes else high, ceiling)
  if was_guess and not has_grads:
    exponent = highest
  new = next_guess(p, memory)
  if new is None and in_a_row:
    new = min(highest, exponent - 2 ** min(in_a_row - 1, 4))
  elif new is None:
    new = min(highest, exponent + 8)
  return 2.0 ** min(max(new, low), high), memory


def next_guess(policy, memory):
  """The exponent to try next in a search, or None."""
  if memory.quiet < 48 + memory.patience:
    return None
  low, high = floor_log2(policy.min_scale), floor_log2(policy.max_scale)
  is_turn, guess = guess_at(memory.quiet, memory.amaxes, (high - low) // 16 + 1)
  if not memory.amaxes and is_turn:
    return floor_log2(policy.init_scale)
  return low + 16 * guess if is_turn or not memory.amaxes else None


def guess_at(quiet, has_evidence, count):
  """Whether it is the turn of another scale, and which of so many.

  Quiet is the number of quiet steps, or an array of them, of uint64.
  """
  number = quiet // 4 if has_evidence else quiet
  is_turn = mixed(quiet // 4) % 4 == quiet % 4
  return is_turn, (number + mixed(number // 16 + 2**19)) % count


def mixed(x):
  """A hash of integers, or of arrays of uint64."""
  x = x * 0xA0E51D65 & 0xFFFFFFFF
  x = (x ^ x >> 15) * 0xB460A327 & 0xFFFFFFFF
  return (x ^ x >> 16) & 0x7FFF


def evidence(policy, amaxes):
  """The exponent of the scale that these ask for."""
  best = _best_exponent(max(amaxes), top(policy) * 2.0**policy.target)
  low, high = floor_log2(policy.min_scale), floor_log2(policy.max_scale)
  return min(max(best, low), high)


def deepest(policy):
  """How far below the evidence the scale may be the reason of an overflow."""
  info = jnp.finfo(policy.dtype)
  return min(20, info.maxexp - info.minexp + policy.target)


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
