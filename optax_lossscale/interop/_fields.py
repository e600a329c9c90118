"""Convert the settings and the state of another system to ours, and back.

Each importer has tables that map the other system's keys to our field names,
as :class:`FieldSpec`. The input comes from files and is not trusted: it is only
read, by known keys or attributes, and never imported, called or evaluated.
Messages quote it through :func:`safe_repr`, since the `repr` of an object may
raise, recurse or never end.

Each exporter checks that the other system can express a policy.
"""

from collections.abc import Collection, Mapping
import dataclasses
import reprlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _checks, _policies, _state

PolicyAndState = tuple[_policies.LossScalePolicy, _state.LossScaleState]

_POLICY_FIELDS = [
  field.name for field in dataclasses.fields(_policies.DynamicLossScale)
]
_REQUIRED: Any = object()


class FieldSpec(NamedTuple):
  """The field that a key of another system maps to.

  Attributes:
    field: our name for the value, which also selects its range.
    default: the value if the key is missing or None; a key without a default is
      required.
  """

  field: str
  default: Any = _REQUIRED


_SCALE_RANGE = _checks.MIN_LOSS_SCALE, _checks.MAX_LOSS_SCALE, False
# By field name: the lowest and highest number, and whether it is an integer.
_NUMBER_RANGES = {
  "init_scale": _SCALE_RANGE,
  "loss_scale": _SCALE_RANGE,
  "min_scale": _SCALE_RANGE,
  "scale": _SCALE_RANGE,
  "growth_factor": (_checks.MIN_GROWTH_FACTOR, _checks.MAX_LOSS_SCALE, False),
  "backoff_factor": (_checks.MIN_LOSS_SCALE, _checks.MAX_BACKOFF_FACTOR, False),
  "growth_interval": (1, _checks.MAX_COUNT, True),
  # Flax's growth_interval is one less than ours.
  "growth_interval_minus_one": (0, _checks.MAX_COUNT - 1, True),
  "finite_count": (0, _checks.MAX_COUNT, True),
}
_BOOL_FIELDS = ("dynamic",)
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


def read_fields(
  caller: str,
  source_name: str,
  source: Any,
  specs: Mapping[str, FieldSpec],
  ignored_keys: Collection[str] = (),
) -> dict[str, Any]:
  """Return the values of a mapping or object by our field names.

  Args:
    caller: the public function, for messages.
    source_name: the name of the source, for messages.
    source: a mapping, whose keys must all be known; or an object, which may
      have other attributes.
    specs: the field of each key or attribute.
    ignored_keys: keys of a mapping that are accepted and ignored.

  Returns:
    The values or their defaults, by field name. The values of numeric fields
    are Python numbers in the range of the field, and those of bool fields
    bools; the values of other fields are unchanged.
  """
  raw_values = _get_raw_values(caller, source_name, source, specs, ignored_keys)
  present_values = {key: x for key, x in raw_values.items() if x is not None}
  required_keys = [key for key, x in specs.items() if x.default is _REQUIRED]
  missing_keys = [key for key in required_keys if key not in present_values]
  if missing_keys:
    raise ValueError(
      f"{caller}: {source_name} must hold {', '.join(required_keys)}, but"
      f" {', '.join(missing_keys)} is missing."
    )
  return {
    field: check_and_convert_field(
      caller, source_name, key, present_values[key], field
    )
    if key in present_values
    else default
    for key, (field, default) in specs.items()
  }


def check_and_convert_field(
  caller: str, source_name: str, key: str, value: Any, field: str
) -> Any:
  """Return a value as the number or bool that its field requires, or raise."""
  value = _unwrap_scalar(value)
  if field in _BOOL_FIELDS:
    requirement = "True or False"
    has_type, is_in_range = isinstance(value, bool), True
  elif field in _NUMBER_RANGES:
    low, high, is_integer = _NUMBER_RANGES[field]
    requirement = _checks.format_range(low, high, integer=is_integer)
    has_type = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is in no range.
    is_in_range = has_type and low <= value <= high
    is_in_range = is_in_range and (not is_integer or value == int(value))
  else:
    return value
  if not (has_type and is_in_range):
    error_type = ValueError if has_type else TypeError
    raise error_type(
      f"{caller}: {key} in {source_name} must be {requirement}, got"
      f" {key} = {safe_repr(value)}."
    )
  if isinstance(value, bool):
    return value
  return int(value) if _NUMBER_RANGES[field][2] else float(value)


def initial_result(policy: _policies.LossScalePolicy) -> PolicyAndState:
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
  caller: str, policy: _policies.DynamicLossScale, values: dict[str, Any]
) -> PolicyAndState:
  """Return a policy and its state at another system's scale and count.

  Args:
    caller: the public function, for messages.
    policy: the policy; all other fields of the state come from its `init`.
    values: the values that were read: the `loss_scale` and the `finite_count`.

  Returns:
    The policy and the state.
  """
  scale, low, high = values["loss_scale"], policy.min_scale, policy.max_scale
  if not np.float32(low) <= scale <= np.float32(high):
    floor, ceiling = _checks.format_bound(low), _checks.format_bound(high)
    raise ValueError(
      f"{caller}: the scale in the state must be between the minimum {floor}"
      f" and the maximum {ceiling} of its settings, got scale = {scale}."
    )
  return policy, policy.init()._replace(
    loss_scale=jnp.asarray(scale, jnp.float32),
    finite_count=jnp.asarray(values["finite_count"], jnp.int32),
  )


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
      f" no other rule, got {safe_repr(policy)}."
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


def safe_repr(value: Any) -> str:
  """Return a short text for a message, for any value."""
  try:
    return _REPR.repr(value)
  except ValueError:  # Python does not print integers of thousands of digits.
    return f"a value of type {type(value).__name__} that is too long to print"


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 2, 60, 60


def _get_raw_values(
  caller: str,
  source_name: str,
  source: Any,
  specs: Mapping[str, FieldSpec],
  ignored_keys: Collection[str],
) -> dict[str, Any]:
  """Return the unvalidated values of known keys; missing keys are left out."""
  known_keys = ", ".join(specs) or "none"
  if isinstance(source, Mapping):
    for key in source:
      if not (isinstance(key, str) and (key in specs or key in ignored_keys)):
        ignored_note = (
          f" Ignored keys: {', '.join(ignored_keys)}." if ignored_keys else ""
        )
        raise ValueError(
          f"{caller}: unknown key {safe_repr(key)} in {source_name}. Known"
          f" keys: {known_keys}.{ignored_note}"
        )
    return {key: source[key] for key in specs if key in source}
  raw_values = {
    key: getattr(source, key) for key in specs if hasattr(source, key)
  }
  if not raw_values:
    raise TypeError(
      f"{caller}: {source_name} must be a dict, or an object with some of these"
      f" attributes: {known_keys}; got {safe_repr(source)}."
    )
  return raw_values


def _unwrap_scalar(value: Any) -> Any:
  """Return the Python number in an array of one element; else the value."""
  try:
    array = np.asarray(value) if hasattr(value, "__array__") else None
    return value if array is None or array.size != 1 else array.item()
  # The array may be traced, on another device, or not even an array. The caller
  # then rejects the value by its type, with a message that names the key.
  except Exception:
    return value


def _format_bound_or_repr(value: Any) -> str:
  """Return a hyperparameter as code for a message."""
  is_number = isinstance(value, (int, float))
  return _checks.format_bound(value) if is_number else repr(value)
