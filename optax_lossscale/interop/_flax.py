"""flax.training.dynamic_scale.DynamicScale."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from optax_lossscale import _checks, _policies
from optax_lossscale.interop import _reading, _results, _writing

_STATIC = {
  "growth_factor": 2.0,
  "backoff_factor": 0.5,
  "growth_interval": 2000,
  "minimum_scale": _checks.SMALLEST_SCALE,
}
_FIELDS = {"fin_steps": None, "scale": None, **_STATIC}


def from_flax(dynamic_scale: Any, **static: Any) -> _results.Result:
  """The policy and state of Flax's `DynamicScale`.

  Flax raises the scale on finite step `growth_interval + 1`. So the interval of
  the policy is one more than that of Flax, and the counter is the same.

  Args:
    dynamic_scale: a `DynamicScale`; or its state dict, which holds `fin_steps`
      and `scale`, and may hold the static fields.
    **static: the static fields that the state dict does not hold:
      `growth_factor`, `backoff_factor`, `growth_interval` and `minimum_scale`.
      Those left out have Flax's defaults, as in `DynamicScale(**static)`: 2,
      1/2, 2000, and 2**-126.

  Returns:
    `(policy, state)`. The scale of a `DynamicScale` is the current one, not the
    first, so that `policy.init_scale` is the current one, too.

  Raises:
    TypeError: if a value is of the wrong type.
    ValueError: if a key is unknown, missing or given twice, or a value is out
      of range.

  Examples:
    >>> from flax.training.dynamic_scale import DynamicScale
    >>> from optax_lossscale import interop
    >>> policy, state = interop.from_flax(DynamicScale(growth_interval=1999))
    >>> policy.growth_interval, state.loss_scale.item()
    (2000, 65536.0)
  """
  values = _read(dynamic_scale, static)
  values.require("fin_steps", "scale")
  interval = values.integer("growth_interval", 0, _checks.LARGEST_COUNT - 1)
  # None stands for no floor.
  has_floor = values.found.get("minimum_scale", 1) is not None
  floor = values.scale("minimum_scale") if has_floor else _checks.SMALLEST_SCALE
  policy = _policies.DynamicLossScale(
    init_scale=values.scale("scale", floor),
    growth_factor=values.growth("growth_factor"),
    backoff_factor=values.backoff("backoff_factor"),
    growth_interval=interval + 1,
    min_scale=floor,
  )
  return _results.resume(policy, values, "scale", "fin_steps")


def to_flax(policy: _policies.LossScalePolicy, state: Any) -> dict[str, Any]:
  """The fields of the `DynamicScale` that goes on as our policy would.

  Args:
    policy: a :class:`~optax_lossscale.DynamicLossScale` without hysteresis, and
      with the `max_scale` 2**126, which is no bound, since Flax has neither.
    state: its state, or a pytree that holds it.

  Returns:
    What `DynamicScale(**fields)` takes. Flax raises the scale one step later
    than its interval says, so that the interval is one less than the policy's.

  Raises:
    TypeError: if the policy is of another class.
    ValueError: if Flax has no such rule, or the tree no such state.

  Examples:
    >>> import optax_lossscale as ols
    >>> policy = ols.DynamicLossScale(growth_interval=2000)
    >>> ols.interop.to_flax(policy, policy.init())["growth_interval"]
    1999
  """
  target = _writing.Target("to_flax", "Flax's DynamicScale")
  dynamic = target.dynamic(policy)
  scale, count = target.scale_and_count(state)
  return {
    "growth_factor": float(dynamic.growth_factor),
    "backoff_factor": float(dynamic.backoff_factor),
    "growth_interval": int(dynamic.growth_interval) - 1,
    "fin_steps": _writing.count_below(count, dynamic.growth_interval),
    "scale": scale,
    "minimum_scale": float(dynamic.min_scale),
  }


def _read(source: Any, static: Mapping[str, Any]) -> _reading.Values:
  name = "from_flax"
  given = _reading.read_mapping(name, "the static fields", static, _STATIC)
  if isinstance(source, Mapping):
    values = _reading.read_mapping(name, "the state dict", source, _FIELDS)
  elif type(source).__name__ == "DynamicScale":
    values = _reading.read_attributes(name, "the DynamicScale", source, _FIELDS)
    values.complete()
  else:
    raise TypeError(
      "from_flax: dynamic_scale must be a DynamicScale or its state dict, got"
      f" {_reading.show(source)}."
    )
  twice = [key for key in given.found if key in values]
  if twice:
    raise ValueError(
      f"from_flax: {', '.join(twice)} must be given once, got it in"
      f" {values.what} and as an argument."
    )
  return dataclasses.replace(values, found={**values.found, **given.found})
