"""Imports and exports flax.training.dynamic_scale.DynamicScale."""

from typing import Any

from optax_lossscale import _checks, _policies, _transfer_guard
from optax_lossscale.interop import _reading, _writing
from optax_lossscale.interop._reading import FieldSpec

_STATIC_FIELDS = {
  "growth_factor": FieldSpec("growth_factor", 2.0),
  "backoff_factor": FieldSpec("backoff_factor", 0.5),
  "growth_interval": FieldSpec("growth_interval_minus_one", 2000),
  # None is no minimum.
  "minimum_scale": FieldSpec("min_scale", _checks.MIN_LOSS_SCALE),
}
_ALL_FIELDS = {
  "fin_steps": FieldSpec("finite_count"),
  "scale": FieldSpec("loss_scale"),
  **_STATIC_FIELDS,
}
_WRITTEN_FIELDS = (
  "growth_factor",
  "backoff_factor",
  "growth_interval",
  "min_scale",
)


@_transfer_guard.allow_transfers
def from_flax(dynamic_scale: Any, **static: Any) -> _reading.PolicyAndState:
  """The policy and state of Flax's `DynamicScale`.

  Flax raises the scale on finite step `growth_interval + 1`. So the interval of
  the policy is Flax's interval plus one, and the counter is the same.

  Args:
    dynamic_scale: a `DynamicScale`; or its state dict, which holds `fin_steps`
      and `scale`, and may hold the static fields.
    **static: the static fields that the state dict does not hold:
      `growth_factor`, `backoff_factor`, `growth_interval` and `minimum_scale`.
      Missing fields have Flax's defaults, as in `DynamicScale(**static)`: 2,
      1/2, 2000, and 2**-126. These arguments override the fields of
      `dynamic_scale`.

  Returns:
    `(policy, state)`. A `DynamicScale` holds the current scale and not the
    initial one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown or missing, or a value out of range.

  Examples:
    >>> from flax.training.dynamic_scale import DynamicScale
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_flax(DynamicScale(growth_interval=1999))
    >>> policy.growth_interval, state.loss_scale.item()
    (2000, 65536.0)
  """
  caller = "from_flax"
  static_specs = {
    key: spec for key, spec in _STATIC_FIELDS.items() if key in static
  }
  values = _reading.read_fields(
    caller, "dynamic_scale", dynamic_scale, _ALL_FIELDS
  )
  values |= _reading.read_fields(
    caller, "the static fields", static, static_specs
  )
  interval = values["growth_interval_minus_one"] + 1
  policy = _reading.make_dynamic_policy(values, growth_interval=interval)
  return _reading.resumed_result(caller, policy, values)


@_transfer_guard.allow_transfers
def to_flax(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The fields of a `DynamicScale` that continues as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` without hysteresis and
      with the `max_scale` 2**126, which is unbounded, since Flax has neither.
    state: its state, or a pytree that holds it.

  Returns:
    The keyword arguments of `DynamicScale(**fields)`. Flax raises the scale one
    step after its interval, so its interval is the policy's minus one.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if Flax can't express the policy, or the tree has no state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(growth_interval=2000)
    >>> ols.interop.to_flax(policy, policy.init())["growth_interval"]
    1999
  """
  caller = "to_flax"
  dynamic_policy = _writing.as_dynamic_policy(
    caller, policy, _WRITTEN_FIELDS, "a DynamicLossScale"
  )
  scale, count = _writing.get_scale_and_count(caller, policy, state)
  return {
    "growth_factor": float(dynamic_policy.growth_factor),
    "backoff_factor": float(dynamic_policy.backoff_factor),
    "growth_interval": int(dynamic_policy.growth_interval) - 1,
    "fin_steps": _writing.clamp_count(count, dynamic_policy.growth_interval),
    "scale": scale,
    "minimum_scale": float(dynamic_policy.min_scale),
  }
