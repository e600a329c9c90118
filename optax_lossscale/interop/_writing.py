"""Checks that another system can express a policy, and reads its state."""

from collections.abc import Collection
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

# The initial scale has no effect after the first step, and the refill has none
# without hysteresis.
_IRRELEVANT_FIELDS = "init_scale", "hysteresis_refill"
# Why a hyperparameter must have its default if the other system lacks it.
_DEFAULT_REASONS = {
  "growth_factor": "it doubles",
  "backoff_factor": "it halves",
  "hysteresis": "it has no hysteresis",
  "max_scale": "its maximum scale is fixed",
}


def as_dynamic_policy(
  caller: str,
  policy: Any,
  written_fields: Collection[str],
  allowed_policies: str = "a DynamicLossScale or a FixedLossScale",
  **required: tuple[float, str],
) -> _policies.DynamicLossScale:
  """Return the policy as a DynamicLossScale, or raise.

  Args:
    caller: the public function, for messages.
    policy: the policy to export.
    written_fields: the hyperparameters that are exported, see
      :func:`check_hyperparams`.
    allowed_policies: the classes that can be exported, for the message.
    **required: values that hyperparameters must have, see
      :func:`check_hyperparams`.

  Returns:
    The same policy; its class and hyperparameters are checked.
  """
  if not isinstance(policy, _policies.DynamicLossScale):
    raise TypeError(
      f"{caller}: policy must be {allowed_policies}, since the other system has"
      f" no other rule, got {_reading.safe_repr(policy)}."
    )
  check_hyperparams(caller, policy, written_fields, **required)
  return policy


def check_hyperparams(
  caller: str,
  policy: Any,
  written_fields: Collection[str],
  **required: tuple[float, str],
) -> None:
  """Raise unless the other system can express all hyperparameters of a policy.

  Each hyperparameter must be exported, or have the only value that the other
  system implements.

  Args:
    caller: the public function, for messages.
    policy: the policy.
    written_fields: the names of the hyperparameters that are exported.
    **required: by hyperparameter, the only value in the other system and the
      reason. A hyperparameter that is missing here must have its default.
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
        " dataclasses.replace(policy,"
        f" {name}={_format_bound_or_repr(expected)})."
      )


def get_scale_and_count(
  caller: str, policy: Any, state: Any
) -> tuple[float, int]:
  """Return the loss scale in a state, and the finite steps since it changed."""
  scale_state = _state.get_loss_scale_state(state)
  shape = jnp.shape(scale_state.loss_scale)
  if shape:
    raise ValueError(
      f"{caller}: state must hold one loss scale, got loss_scale of shape"
      f" {shape}. Convert each member of a vmapped state separately:"
      " jax.tree.map(lambda x: x[0], state)."
    )
  scale = float(scale_state.loss_scale)
  low, high = _policies.get_scale_bounds(policy)
  # The scale is a float32 number, so a scale at its bound is the bound rounded
  # to float32.
  if low is not None and not np.float32(low) <= scale <= np.float32(high):
    raise ValueError(
      f"{caller}: the scale in the state must be between the minimum"
      f" {_format_bound_or_repr(low)} and the maximum"
      f" {_format_bound_or_repr(high)} of the policy, got {scale}."
      " optax_lossscale would return to this range in the next step, but the"
      " other system would not. Set the scale with set_loss_scale(state, ...)."
    )
  return scale, int(scale_state.finite_count)


def clamp_count(count: int, interval: int) -> int:
  """Return the count for a system that grows at `count == interval`.

  With a count beyond the interval, the other system would never grow again. Our
  policy tests `count >= interval` and grows on the next finite step, so the
  count is clamped to one step before the interval, from where the other system
  grows on the next finite step, too.
  """
  return min(count, int(interval) - 1)


def _format_bound_or_repr(value: Any) -> str:
  """Return a hyperparameter as code for a message."""
  is_number = isinstance(value, (int, float))
  return _checks.format_bound(value) if is_number else repr(value)
