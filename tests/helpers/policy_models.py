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

  safe: int = 15
  fail: int = 128
  credit: int = 0
  term: int = 8
  quiet: int = 0  # steps in a row
  wait: int = 8
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
    return Learned(safe=floor_log2(policy.init_scale))
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
  exponent = floor_log2(scale)
  if in_a_row:
    memory = after_overflow(policy, exponent, memory, in_a_row)
  elif 2.0**-126 <= amax < math.inf:
    memory = after_grads(policy, exponent, memory, amax)
  else:
    memory = after_zeros(policy, exponent, memory)
  new = next_guess(policy, memory)
  return 2.0 ** (usual(policy, memory) if new is None else new), memory


def after_grads(policy, exponent, memory, amax):
  _, fail, credit, term, quiet, wait, amaxes = memory
  in_vain, at_usual = True, amax * 2.0 ** usual(policy, memory)
  smallest = float(jnp.finfo(policy.dtype).smallest_subnormal)
  if next_guess(policy, memory) is not None:
    in_vain = max(smallest, 2.0**-126) <= at_usual <= top(policy)
  if quiet >= wait and in_vain:
    wait = min(2 * wait, 512)
  elif quiet == 0:
    wait = max(wait - wait // 8, 8)
  amaxes = (amax, *(amaxes if in_vain else ()))[: policy.window]
  best = evidence(policy, amaxes)
  if not in_vain or fail <= exponent or fail <= lowest(policy, amaxes):
    fail = 128
  credit = 0 if amax * 2.0**exponent > top(policy) / 2 else credit + 1
  below = best - limit(exponent, fail)
  if fail < 128 and below > 0 and credit >= term // 2 ** (below // 6):
    fail, credit, term = fail + 1, 0, max(term // 2, 1)
  return Learned(exponent, fail, min(credit, 8192), term, 0, wait, amaxes)


def after_zeros(policy, exponent, memory):
  if not memory.amaxes:
    memory = memory._replace(safe=max(memory.safe, exponent), fail=128)
  elif memory.fail <= lowest(policy, memory.amaxes):
    memory = memory._replace(safe=evidence(policy, memory.amaxes), fail=128)
  return memory._replace(quiet=memory.quiet + 1)


def after_overflow(policy, exponent, memory, in_a_row):
  quiet = memory.quiet + 1
  if next_guess(policy, memory) is not None:
    return memory._replace(quiet=quiet)
  if memory.quiet == 0 and memory.credit >= 256:
    return memory._replace(credit=memory.credit - 256, quiet=quiet)
  drop = 1 if memory.quiet == 0 else 8
  safe = min(memory.safe, exponent - 2 * drop)
  return memory._replace(
    safe=max(safe, 2 * lowest(policy, memory.amaxes) - exponent),
    fail=min(memory.fail, exponent),
    credit=0,
    term=min(4 * memory.term, 8192) if in_a_row == 1 else memory.term,
    quiet=quiet,
  )


def usual(policy, memory):
  """The exponent of the next scale, if it is not one of a search."""
  low, high = floor_log2(policy.min_scale), floor_log2(policy.max_scale)
  best = evidence(policy, memory.amaxes) if memory.amaxes else high
  return min(max(min(best, limit(memory.safe, memory.fail)), low), high)


def limit(safe, fail):
  return safe + min((fail - safe) // 2, 8)


def lowest(policy, amaxes):
  """The exponent at which the scale is no reason for an overflow."""
  low = floor_log2(policy.min_scale)
  if not amaxes:
    return low - 1
  info = jnp.finfo(policy.dtype)
  deepest = min(24, info.maxexp - 1 - info.minexp + policy.target)
  return max(evidence(policy, amaxes) - deepest, low)


def next_guess(policy, memory):
  """The exponent to try next in a search, or None."""
  step = memory.quiet - memory.wait
  if step < 0:
    return None
  low, high = floor_log2(policy.min_scale), floor_log2(policy.max_scale)
  turn, guess = guess_at(step, (high - low) // 16 + 1)
  if turn == 0:
    return low + 16 * guess
  if turn == 2 and not memory.amaxes:
    return floor_log2(policy.init_scale)
  return evidence(policy, memory.amaxes) if turn == 2 else None


def guess_at(step, count):
  """Whose turn it is (0 for a guess), and which of so many guesses.

  Step is the number of the step in the search, or an array of them, of uint64.
  """
  block = step // 4
  turn = (mixed(block) + step) % 4
  return turn, (block + mixed(block // 16 + 2**19)) % count


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
