"""Checks shared by the functions that write another system's state."""

import dataclasses
from typing import Any

import jax
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading


@dataclasses.dataclass(frozen=True)
class Rule:
  """A policy that is to be written as another system's.

  Attributes:
    function: the public function, for the messages.
    system: the other system, for the messages.
    policy: the policy.
  """

  function: str
  system: str
  policy: Any

  def dynamic(self) -> _policies.DynamicLossScale:
    """The policy, if it counts to N, without hysteresis or ceiling."""
    if not isinstance(self.policy, _policies.DynamicLossScale):
      raise TypeError(
        f"{self.function}: policy must be a DynamicLossScale or a"
        " FixedLossScale, whose rules other systems know, got"
        f" {_reading.show(self.policy)}."
      )
    self.require("hysteresis", 1, "it has no hysteresis")
    self.require("max_scale", _checks.LARGEST_SCALE, "it has no such ceiling")
    return self.policy

  def require(self, field: str, only: float, why: str) -> None:
    """Raises unless a hyperparameter is the one that the system has."""
    got = getattr(self.policy, field)
    if got != only:
      raise ValueError(
        f"{self.function}: {self.system} cannot express {field} ="
        f" {_reading.show(got)}: {why}. It would go on differently from"
        f" {type(self.policy).__name__}({field}="
        f"{_reading.show(got)}); give one with"
        f" {field}={_checks.show_bound(only)}"
        " (dataclasses.replace(policy, ...)) if that is meant."
      )


@dataclasses.dataclass(frozen=True)
class Now:
  """The state as plain Python numbers.

  Attributes:
    scale: the loss scale.
    count: finite steps since it moved.
  """

  scale: float
  count: int

  def count_below(self, interval: int) -> int:
    """The count for a system that tests for equality, not for `>=`.

    Beyond its interval it would never grow again; ours grows on the next finite
    step, as that system does from one step before the interval.
    """
    return min(self.count, int(interval) - 1)


def read_state(function: str, tree: Any) -> Now:
  """The state that a tree holds, read to the host."""
  state = _state.get_loss_scale_state(tree)
  if isinstance(state.loss_scale, jax.core.Tracer):
    raise TypeError(
      f"{function}: state must be known outside of jit, got a traced one."
    )
  scale, count = np.asarray(state.loss_scale), np.asarray(state.finite_count)
  if scale.shape or count.shape:
    raise ValueError(
      f"{function}: state must be that of one loss scale, got loss_scale of"
      f" shape {scale.shape}. Take one member of the batch."
    )
  low, high = _checks.SMALLEST_SCALE, _checks.LARGEST_SCALE
  if not low <= scale <= high:
    raise ValueError(
      f"{function}: loss_scale in state must be a number in [2**-126, 2**126],"
      f" got loss_scale = {scale}."
    )
  return Now(float(scale), int(count))
