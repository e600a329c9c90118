"""Builds the policy and the state that an importer returns."""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state

_Policy = TypeVar("_Policy", bound=_policies.LossScalePolicy)
PolicyAndState = tuple[_policies.LossScalePolicy, _state.LossScaleState]

_POLICY_FIELDS = [
  field.name for field in dataclasses.fields(_policies.DynamicLossScale)
]


def initial_result(policy: _Policy) -> tuple[_Policy, _state.LossScaleState]:
  """Return a policy and its state before the first step."""
  return policy, policy.init()


def make_dynamic_policy(
  values: dict[str, Any], **overrides: Any
) -> _policies.DynamicLossScale:
  """Return the DynamicLossScale with the hyperparameters of another system.

  Args:
    values: the values that were read, by field name. The keys that are not
      hyperparameters are ignored. If there is a `loss_scale` but no
      `init_scale`, the current scale becomes the initial one. Without a
      `min_scale`, the minimum is the smallest normal float32 number.
    **overrides: hyperparameters that are constants in the other system.

  Returns:
    The policy.
  """
  fields = {"min_scale": _checks.MIN_LOSS_SCALE, **values, **overrides}
  current_scale, min_scale = values.get("loss_scale"), fields["min_scale"]
  if current_scale is not None:
    # A scale at a minimum of 0.7 is float32(0.7), which is less than 0.7 and
    # would be rejected as an initial scale.
    fields.setdefault(
      "init_scale",
      min_scale if np.float32(min_scale) == current_scale else current_scale,
    )
  hyperparams = {
    name: fields[name] for name in _POLICY_FIELDS if name in fields
  }
  return _policies.DynamicLossScale(**hyperparams)


def resumed_result(
  caller: str, policy: _Policy, values: dict[str, Any]
) -> tuple[_Policy, _state.LossScaleState]:
  """Return a policy and its state at another system's scale and counts.

  Args:
    caller: the public function, for messages.
    policy: the policy; all other fields of the state come from its `init`.
    values: the values that were read: the `loss_scale` and, if the other system
      has them, `finite_count`, `hysteresis` and `hysteresis_remaining`.

  Returns:
    The policy and the state.
  """
  scale, state = values["loss_scale"], policy.init()
  low, high = _policies.get_scale_bounds(policy)
  if low is not None and not np.float32(low) <= scale <= np.float32(high):
    floor, ceiling = _checks.format_bound(low), _checks.format_bound(high)
    raise ValueError(
      f"{caller}: the scale in the state must be between the minimum {floor}"
      f" and the maximum {ceiling} of its settings, got scale = {scale}."
    )
  policy_state, hysteresis = state.policy_state, values.get("hysteresis", 1)
  remaining = values.get("hysteresis_remaining", hysteresis)
  if remaining > hysteresis:
    raise ValueError(
      f"{caller}: the remaining hysteresis in the state must be at most the"
      f" hysteresis in its settings, {hysteresis}, got {remaining}."
    )
  if policy_state and "hysteresis_remaining" in values:
    # Some trackers keep counting below zero, which has the same effect as 0.
    remaining = jnp.asarray(max(remaining, 0), jnp.int32)
    policy_state = policy_state._replace(hysteresis_remaining=remaining)
  return policy, state._replace(
    loss_scale=jnp.asarray(scale, jnp.float32),
    finite_count=jnp.asarray(values.get("finite_count", 0), jnp.int32),
    policy_state=policy_state,
  )
