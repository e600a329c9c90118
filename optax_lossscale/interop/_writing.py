"""What the functions that write another system's state share."""

from collections.abc import Collection
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

# The first scale acts no more, and the refill only where there is hysteresis.
_IRRELEVANT_FIELDS = "init_scale", "hysteresis_refill"
# Why a hyperparameter must have its default where the other system lacks it.
_DEFAULT_REASONS = {
  "growth_factor": "it doubles",
  "backoff_factor": "it halves",
  "hysteresis": "it has no hysteresis",
  "max_scale": "its maximum scale is fixed",
}


def check_dynamic_policy(
  caller: str,
  policy: Any,
  written_fields: Collection[str],
  allowed_policies: str = "a DynamicLossScale or a FixedLossScale",
  **required: tuple[float, str],
) -> _policies.DynamicLossScale:
  """The policy, if the other system has its rule.

  Args:
    caller: the public function, for the messages.
    policy: the policy that is to be written as the other system's.
    written_fields: the hyperparameters that are written, see :func:`check_hyperparams`.
    allowed_policies: the policies that are, for the message.
    **only: what else the system has, see :func:`check_hyperparams`.

  Returns:
    The policy.
  """
  if not isinstance(policy, _policies.DynamicLossScale):
    raise TypeError(
      f"{caller}: policy must be {allowed_policies}, since the other system has no other"
      f" rule, got {_reading.safe_repr(policy)}."
    )
  check_hyperparams(caller, policy, written_fields, **required)
  return policy


def check_hyperparams(
  caller: str,
  policy: Any,
  written_fields: Collection[str],
  **required: tuple[float, str],
) -> None:
  """Raises unless the other system has all hyperparameters of a policy.

  Each one must be written, or have the one value that the system has.

  Args:
    caller: the public function, for the messages.
    policy: the policy.
    written_fields: the names of the hyperparameters that are written.
    **only: by the name of a hyperparameter, its one value there, and why; its
      default, if it is not named.
  """
  for field in dataclasses.fields(policy):
    name, actual = field.name, getattr(policy, field.name)
    default_reason = _DEFAULT_REASONS.get(name, "it has no such hyperparameter")
    expected, cause = required.get(name, (field.default, default_reason))
    if (
      name not in (*written_fields, *_IRRELEVANT_FIELDS) and actual != expected
    ):
      raise ValueError(
        f"{caller}: the other system cannot express {name} = {actual}: {cause}."
        " If the scale may change differently there, pass"
        f" dataclasses.replace(policy, {name}={_format_value(expected)})."
      )


def get_scale_and_count(
  caller: str, policy: Any, tree: Any
) -> tuple[float, int]:
  """The loss scale that a tree holds, and the finite steps since it moved."""
  state = _state.get_loss_scale_state(tree)
  shape = jnp.shape(state.loss_scale)
  if shape:
    raise ValueError(
      f"{caller}: state must hold one loss scale, got loss_scale of shape"
      f" {shape}. Convert each member of a vmapped state separately:"
      " jax.tree.map(lambda x: x[0], state)."
    )
  scale = float(state.loss_scale)
  low, high = _policies.get_scale_bounds(policy)
  # The scale is the bound in float32.
  if low is not None and not np.float32(low) <= scale <= np.float32(high):
    raise ValueError(
      f"{caller}: the scale in the state must be between the minimum"
      f" {_format_value(low)} and the maximum {_format_value(high)} of the policy, got {scale}."
      " optax_lossscale would return to this range in the next step, but the"
      " other system would not. Set the scale with set_loss_scale(state, ...)."
    )
  return scale, int(state.finite_count)


def clamp_count(count: int, interval: int) -> int:
  """The count for a system that tests for equality, not for `>=`.

  Beyond its interval it would never grow again; ours grows on the next finite
  step, as that system does from one step before the interval.
  """
  return min(count, int(interval) - 1)


def _format_value(value: Any) -> str:
  is_number = isinstance(value, (int, float))
  return _checks.format_bound(value) if is_number else repr(value)
