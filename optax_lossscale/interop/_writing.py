"""Checks shared by the functions that write another system's state."""

import dataclasses
from typing import Any

import jax
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading


@dataclasses.dataclass(frozen=True)
class Target:
  """What is written for, and which of our policies it can express.

  Attributes:
    function: the public function, for the messages.
    system: the other system, for the messages.
  """

  function: str
  system: str

  def dynamic(
    self, policy: Any, **only: tuple[float, str]
  ) -> _policies.DynamicLossScale:
    """The policy, if it counts to N, without hysteresis or ceiling.

    Args:
      policy: the policy that is to be written as the other system's.
      **only: what else the system cannot express, see :meth:`check`.

    Returns:
      The policy.
    """
    if not isinstance(policy, _policies.DynamicLossScale):
      raise TypeError(
        f"{self.function}: policy must be a DynamicLossScale or a"
        " FixedLossScale, whose rules other systems know, got"
        f" {_reading.show(policy)}."
      )
    self.check(
      policy,
      hysteresis=(1, "it has no hysteresis"),
      max_scale=(_checks.LARGEST_SCALE, "it has no such ceiling"),
      **only,
    )
    return policy

  def check(self, policy: Any, **only: tuple[float, str]) -> None:
    """Raises unless hyperparameters are those that the other system has.

    Args:
      policy: the policy.
      **only: by the name of a hyperparameter, its one value there, and why.
    """
    for field, (value, why) in only.items():
      if getattr(policy, field) != value:
        got = _reading.show(getattr(policy, field))
        raise ValueError(
          f"{self.function}: {self.system} cannot express {field} = {got}:"
          f" {why}. It would go on differently from"
          f" {type(policy).__name__}({field}={got}); give one with"
          f" {field}={_checks.show_bound(value)}"
          " (dataclasses.replace(policy, ...)) if that is meant."
        )

  def scale_and_count(self, tree: Any) -> tuple[float, int]:
    """The loss scale that a tree holds, and the finite steps since it moved."""
    state = _state.get_loss_scale_state(tree)
    if isinstance(state.loss_scale, jax.core.Tracer):
      raise TypeError(
        f"{self.function}: state must be known outside of jit, got a traced"
        " one."
      )
    scale, count = np.asarray(state.loss_scale), np.asarray(state.finite_count)
    if scale.shape or count.shape:
      raise ValueError(
        f"{self.function}: state must be that of one loss scale, got loss_scale"
        f" of shape {scale.shape}. Take one member of the batch."
      )
    low, high = _checks.SMALLEST_SCALE, _checks.LARGEST_SCALE
    if not low <= scale <= high:
      raise ValueError(
        f"{self.function}: loss_scale in state must be"
        f" {_checks.range_rule(low, high)}, got loss_scale = {scale}."
      )
    return float(scale), int(count)


def count_below(count: int, interval: int) -> int:
  """The count for a system that tests for equality, not for `>=`.

  Beyond its interval it would never grow again; ours grows on the next finite
  step, as that system does from one step before the interval.
  """
  return min(count, int(interval) - 1)
