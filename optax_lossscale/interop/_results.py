"""What is made of what was read: a policy, and the state it goes on from."""

from typing import TypeVar

import jax.numpy as jnp

from optax_lossscale import _checks, _policies, _state
from optax_lossscale.interop import _reading

_Policy = TypeVar("_Policy", bound=_policies.LossScalePolicy)
Result = tuple[_policies.LossScalePolicy, _state.LossScaleState]


def fixed(scale: float) -> Result:
  """A fixed scale; that of 1 stands for a scaler that is switched off."""
  return start(_policies.FixedLossScale(scale))


def start(policy: _Policy) -> tuple[_Policy, _state.LossScaleState]:
  """A policy, and its state before the first step."""
  return policy, policy.init()


def resume(
  policy: _Policy,
  values: _reading.Values,
  scale: str,
  count: str | None = None,
  left: int | None = None,
) -> tuple[_Policy, _state.LossScaleState]:
  """A policy, and its state at another system's scale and count.

  Args:
    policy: the policy, whose `init` gives all that is not known.
    values: what was read.
    scale: the key of the scale.
    count: the key of the count of finite steps, if there is one.
    left: how many overflows are left until one lowers the scale. A policy
      without hysteresis has no place for it.

  Returns:
    The policy and the state.
  """
  value = values.scale(scale)
  low = getattr(policy, "min_scale", _checks.SMALLEST_SCALE)
  high = getattr(policy, "max_scale", _checks.LARGEST_SCALE)
  if not low <= value <= high:
    floor, ceiling = _checks.show_bound(low), _checks.show_bound(high)
    rule = (
      f"between the floor {floor} and the ceiling {ceiling} of its settings"
    )
    values.fail(scale, rule, ValueError)
  finite = values.integer(count, 0, _checks.LARGEST_COUNT) if count else 0
  state = policy.init()
  memory = state.memory
  if left is not None and memory:
    memory = memory._replace(hysteresis_left=jnp.asarray(left, jnp.int32))
  return policy, state._replace(
    loss_scale=jnp.asarray(value, jnp.float32),
    finite_count=jnp.asarray(finite, jnp.int32),
    memory=memory,
  )
