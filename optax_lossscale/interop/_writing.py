"""Checks shared by the functions that write another system's state."""

from typing import Any

import jax
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading


def dynamic_policy(
  function: str, system: str, policy: Any
) -> _policies.DynamicLossScale:
  """The policy, if it counts to N, without hysteresis or ceiling.

  Args:
    function: the public function, for the messages.
    system: the other system, for the messages.
    policy: the policy that is to be written as the other system's.

  Returns:
    The policy.
  """
  if not isinstance(policy, _policies.DynamicLossScale):
    raise TypeError(
      f"{function}: policy must be a DynamicLossScale or a"
      " FixedLossScale, whose rules other systems know, got"
      f" {_reading.show(policy)}."
    )
  check_expressible(
    function,
    system,
    policy,
    hysteresis=(1, "it has no hysteresis"),
    max_scale=(_checks.LARGEST_SCALE, "it has no such ceiling"),
  )
  return policy


def check_expressible(
  function: str, system: str, policy: Any, **only: tuple[float, str]
) -> None:
  """Raises unless hyperparameters are those that the other system has.

  Args:
    function: the public function, for the messages.
    system: the other system, for the messages.
    policy: the policy.
    **only: by the name of a hyperparameter, its one value there, and why.
  """
  for field, (value, why) in only.items():
    got = getattr(policy, field)
    if got != value:
      raise ValueError(
        f"{function}: {system} cannot express {field} ="
        f" {_reading.show(got)}: {why}. It would go on differently from"
        f" {type(policy).__name__}({field}={_reading.show(got)}); give one with"
        f" {field}={_checks.show_bound(value)}"
        " (dataclasses.replace(policy, ...)) if that is meant."
      )


def scale_and_count(function: str, tree: Any) -> tuple[float, int]:
  """The loss scale that a tree holds, and the finite steps since it moved."""
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
      f"{function}: loss_scale in state must be"
      f" {_checks.range_rule(low, high)}, got loss_scale = {scale}."
    )
  return float(scale), int(count)


def count_below(count: int, interval: int) -> int:
  """The count for a system that tests for equality, not for `>=`.

  Beyond its interval it would never grow again; ours grows on the next finite
  step, as that system does from one step before the interval.
  """
  return min(count, int(interval) - 1)
