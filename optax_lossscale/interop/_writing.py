"""What the functions that write another system's state share."""

from typing import Any

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading


def dynamic(
  function: str, policy: Any, **only: tuple[float, str]
) -> _policies.DynamicLossScale:
  """The policy, if it counts to N, without hysteresis or ceiling.

  Args:
    function: the public function, for the messages.
    policy: the policy that is to be written as the other system's.
    **only: what else the system cannot express, see :func:`check`.

  Returns:
    The policy.
  """
  if not isinstance(policy, _policies.DynamicLossScale):
    raise TypeError(
      f"{function}: policy must be a DynamicLossScale or a FixedLossScale,"
      f" whose rules other systems know, got {_reading.show(policy)}."
    )
  check(
    function,
    policy,
    hysteresis=(1, "it has no hysteresis"),
    max_scale=(_checks.LARGEST_SCALE, "it has no such ceiling"),
    **only,
  )
  return policy


def check(function: str, policy: Any, **only: tuple[float, str]) -> None:
  """Raises unless hyperparameters are those that the other system has.

  Args:
    function: the public function, for the messages.
    policy: the policy.
    **only: by the name of a hyperparameter, its one value there, and why.
  """
  for field, (value, why) in only.items():
    got = getattr(policy, field)
    if got != value:
      raise ValueError(
        f"{function}: the other system cannot express {field} = {got}: {why}."
        f" Give a policy with {field}={_checks.show_bound(value)}"
        " (dataclasses.replace(policy, ...)) if it may go on differently."
      )


def scale_and_count(tree: Any) -> tuple[float, int]:
  """The loss scale that a tree holds, and the finite steps since it moved."""
  state = _state.get_loss_scale_state(tree)
  return float(state.loss_scale), int(state.finite_count)


def count_below(count: int, interval: int) -> int:
  """The count for a system that tests for equality, not for `>=`.

  Beyond its interval it would never grow again; ours grows on the next finite
  step, as that system does from one step before the interval.
  """
  return min(count, int(interval) - 1)
