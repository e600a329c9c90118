"""What the functions that write another system's state share."""

from collections.abc import Collection
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

# The first scale acts no more, and the refill only where there is hysteresis.
_WITHOUT_EFFECT = "init_scale", "hysteresis_refill"
# Why a hyperparameter must have its default where the other system lacks it.
_REASONS = {
  "growth_factor": "it doubles",
  "backoff_factor": "it halves",
  "hysteresis": "it has no hysteresis",
  "max_scale": "its maximum scale is fixed",
}


def dynamic(
  function: str,
  policy: Any,
  written: Collection[str],
  kinds: str = "a DynamicLossScale or a FixedLossScale",
  **only: tuple[float, str],
) -> _policies.DynamicLossScale:
  """The policy, if the other system has its rule.

  Args:
    function: the public function, for the messages.
    policy: the policy that is to be written as the other system's.
    written: the hyperparameters that are written, see :func:`check`.
    kinds: the policies that are, for the message.
    **only: what else the system has, see :func:`check`.

  Returns:
    The policy.
  """
  if not isinstance(policy, _policies.DynamicLossScale):
    raise TypeError(
      f"{function}: policy must be {kinds}, since the other system has no other"
      f" rule, got {_reading.safe_repr(policy)}."
    )
  check(function, policy, written, **only)
  return policy


def check(
  function: str,
  policy: Any,
  written: Collection[str],
  **only: tuple[float, str],
) -> None:
  """Raises unless the other system has all hyperparameters of a policy.

  Each one must be written, or have the one value that the system has.

  Args:
    function: the public function, for the messages.
    policy: the policy.
    written: the names of the hyperparameters that are written.
    **only: by the name of a hyperparameter, its one value there, and why; its
      default, if it is not named.
  """
  for field in dataclasses.fields(policy):
    name, got = field.name, getattr(policy, field.name)
    reason = _REASONS.get(name, "it has no such hyperparameter")
    value, why = only.get(name, (field.default, reason))
    if name not in (*written, *_WITHOUT_EFFECT) and got != value:
      raise ValueError(
        f"{function}: the other system cannot express {name} = {got}: {why}."
        " If the scale may change differently there, pass"
        f" dataclasses.replace(policy, {name}={_show(value)})."
      )


def scale_and_count(function: str, policy: Any, tree: Any) -> tuple[float, int]:
  """The loss scale that a tree holds, and the finite steps since it moved."""
  state = _state.get_loss_scale_state(tree)
  shape = jnp.shape(state.loss_scale)
  if shape:
    raise ValueError(
      f"{function}: state must hold one loss scale, got loss_scale of shape"
      f" {shape}. Convert each member of a vmapped state separately:"
      " jax.tree.map(lambda x: x[0], state)."
    )
  scale = float(state.loss_scale)
  low, high = _policies.get_scale_bounds(policy)
  # The scale is the bound in float32.
  if low is not None and not np.float32(low) <= scale <= np.float32(high):
    raise ValueError(
      f"{function}: the scale in the state must be between the minimum"
      f" {_show(low)} and the maximum {_show(high)} of the policy, got {scale}."
      " optax_lossscale would return to this range in the next step, but the"
      " other system would not. Set the scale with set_loss_scale(state, ...)."
    )
  return scale, int(state.finite_count)


def count_below(count: int, interval: int) -> int:
  """The count for a system that tests for equality, not for `>=`.

  Beyond its interval it would never grow again; ours grows on the next finite
  step, as that system does from one step before the interval.
  """
  return min(count, int(interval) - 1)


def _show(value: Any) -> str:
  is_number = isinstance(value, (int, float))
  return _checks.format_bound(value) if is_number else repr(value)
