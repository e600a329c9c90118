"""What is made of what was read: a policy, and the state it goes on from."""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state

_Policy = TypeVar("_Policy", bound=_policies.LossScalePolicy)
Result = tuple[_policies.LossScalePolicy, _state.LossScaleState]

_FIELDS = [
  field.name for field in dataclasses.fields(_policies.DynamicLossScale)
]


def fixed(scale: float) -> Result:
  """A fixed scale; that of 1 stands for a scaler that is switched off."""
  return start(_policies.FixedLossScale(scale))


def start(policy: _Policy) -> tuple[_Policy, _state.LossScaleState]:
  """A policy, and its state before the first step."""
  return policy, policy.init()


def dynamic(
  values: dict[str, Any], **others: Any
) -> _policies.DynamicLossScale:
  """The dynamic scale with what was read, and what the system always does.

  Where only the current scale was read, it is the first one, too; a system
  without a floor has that of float32.
  """
  known = {"min_scale": _checks.MIN_LOSS_SCALE, **values, **others}
  first, low = values.get("loss_scale"), known["min_scale"]
  if first is not None:
    # In float32, a scale at a floor of 0.7 is less than that.
    known.setdefault("init_scale", low if np.float32(low) == first else first)
  chosen = {name: known[name] for name in _FIELDS if name in known}
  return _policies.DynamicLossScale(**chosen)


def resume(
  function: str, policy: _Policy, values: dict[str, Any]
) -> tuple[_Policy, _state.LossScaleState]:
  """A policy, and its state at another system's scale and counts.

  Args:
    function: the public function, for the messages.
    policy: the policy, whose `init` gives all that is not known.
    values: what was read: the `loss_scale`; and, if there are such, the
      `finite_count`, the `hysteresis` and the `hysteresis_remaining`.

  Returns:
    The policy and the state.
  """
  scale, state = values["loss_scale"], policy.init()
  low, high = _policies.get_scale_bounds(policy)
  if low is not None and not np.float32(low) <= scale <= np.float32(high):
    floor, ceiling = _checks.format_bound(low), _checks.format_bound(high)
    raise ValueError(
      f"{function}: the scale in the state must be between the minimum {floor}"
      f" and the maximum {ceiling} of its settings, got scale = {scale}."
    )
  policy_state, full = state.policy_state, values.get("hysteresis", 1)
  left = values.get("hysteresis_remaining", full)
  if left > full:
    raise ValueError(
      f"{function}: the remaining hysteresis in the state must be at most the"
      f" hysteresis in its settings, {full}, got {left}."
    )
  if policy_state and "hysteresis_remaining" in values:
    # Some count on below zero, which has the same effect.
    left = jnp.asarray(max(left, 0), jnp.int32)
    policy_state = policy_state._replace(hysteresis_remaining=left)
  return policy, state._replace(
    loss_scale=jnp.asarray(scale, jnp.float32),
    finite_count=jnp.asarray(values.get("finite_count", 0), jnp.int32),
    policy_state=policy_state,
  )
