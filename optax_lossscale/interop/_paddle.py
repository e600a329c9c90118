"""Imports paddle.amp.GradScaler."""

from collections.abc import Mapping
from typing import Any

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import FieldSpec

_KEYS = {
  "scale": FieldSpec("loss_scale"),
  "incr_ratio": FieldSpec("growth_factor"),
  "decr_ratio": FieldSpec("backoff_factor"),
  "incr_every_n_steps": FieldSpec("growth_interval"),
  "decr_every_n_nan_or_inf": FieldSpec("hysteresis"),
  "incr_count": FieldSpec("finite_count"),
  "decr_count": FieldSpec("overflows"),
  "use_dynamic_loss_scaling": FieldSpec("dynamic"),
}


@_transfer_guard.allow_transfers
def from_paddle(state_dict: Any) -> _results.PolicyAndState:
  """The policy and state of a `paddle.amp.GradScaler`.

  It raises the scale on the N-th finite step, and lowers it on every n-th
  overflow in a row. Its scale is unbounded and may become 0 or inf. Our scale
  stays within [2**-126, 2**126].

  Args:
    state_dict: `scaler.state_dict()`. The state dict of a disabled scaler is
      empty, and gives `FixedLossScale(1.0)`.

  Returns:
    `(policy, state)`. The state dict holds the current scale and not the
    initial one, so `policy.init_scale` is the current scale, too. Without
    dynamic scaling, the policy is a `FixedLossScale`.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> import numpy as np
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_paddle({
    ...     "scale": np.array([1024.0], np.float32),
    ...     "incr_ratio": 2.0, "decr_ratio": 0.5,
    ...     "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2,
    ...     "incr_count": 0, "decr_count": 1, "use_dynamic_loss_scaling": True})
    >>> policy.hysteresis_refill, state.policy_state.hysteresis_remaining.item()
    ('backoff', 1)
  """
  if isinstance(state_dict, Mapping) and not state_dict:
    return _results.initial_result(_policies.FixedLossScale(1.0))
  caller = "from_paddle"
  values = _reading.read_fields(caller, "state_dict", state_dict, _KEYS)
  if not values["dynamic"]:
    fixed_policy = _policies.FixedLossScale(values["loss_scale"])
    return _results.initial_result(fixed_policy)
  # Paddle counts overflows up, and our hysteresis counts down.
  values["hysteresis_remaining"] = values["hysteresis"] - values["overflows"]
  policy = _results.make_dynamic_policy(values, hysteresis_refill="backoff")
  return _results.resumed_result(caller, policy, values)
