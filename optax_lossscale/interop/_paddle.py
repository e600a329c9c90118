"""paddle.amp.GradScaler."""

from typing import Any

from optax_lossscale import _checks, _policies
from optax_lossscale.interop import _reading, _results

_KEYS = (
  "scale",
  "incr_ratio",
  "decr_ratio",
  "incr_every_n_steps",
  "decr_every_n_nan_or_inf",
  "incr_count",
  "decr_count",
  "use_dynamic_loss_scaling",
)


def from_paddle(state_dict: Any) -> _results.Result:
  """The policy and state of a `paddle.amp.GradScaler`.

  It raises the scale on the N-th finite step, and lowers it on every n-th
  overflow in a row. It has neither floor nor ceiling, and may become 0 or inf.
  Ours stays within [2**-126, 2**126].

  Args:
    state_dict: `scaler.state_dict()`. That of a disabled scaler is empty, and
      gives `FixedLossScale(1.0)`.

  Returns:
    `(policy, state)`. The state dict holds the current scale, not the first
    one, so that `policy.init_scale` is the current one, too. Without dynamic
    scaling, the policy is a fixed one.

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
    >>> policy.hysteresis_refill, state.memory.hysteresis_left.item()
    ('backoff', 1)
  """
  values = _reading.read_mapping("from_paddle", "state_dict", state_dict, _KEYS)
  if not values.found:
    return _results.fixed(1.0)
  values.complete()
  if not values.boolean("use_dynamic_loss_scaling"):
    return _results.fixed(values.scale("scale"))
  overflows = values.count("decr_every_n_nan_or_inf")
  policy = _policies.DynamicLossScale(
    init_scale=values.scale("scale"),
    growth_factor=values.growth("incr_ratio"),
    backoff_factor=values.backoff("decr_ratio"),
    growth_interval=values.count("incr_every_n_steps"),
    min_scale=_checks.SMALLEST_SCALE,
    hysteresis=overflows,
    hysteresis_refill="backoff",
  )
  left = overflows - values.integer("decr_count", 0, overflows - 1)
  return _results.resume(policy, values, "scale", "incr_count", left)
