"""The loss scales of jmp, and MindSpore's, which are shaped after them."""

from typing import Any

from optax_lossscale import _policies
from optax_lossscale.interop import _reading, _results

# The attributes of each class, by its name: the scale; the count, the interval
# and the factor of a dynamic one; and its floor, which is 1 if it has none.
_CLASSES = {
  "DynamicLossScale": (
    "loss_scale",
    "counter",
    "period",
    "factor",
    "min_loss_scale",
  ),
  "StaticLossScale": ("loss_scale",),
  "NoOpLossScale": (),
  "DynamicLossScaler": (
    "scale_value",
    "counter",
    "scale_window",
    "scale_factor",
  ),
  "StaticLossScaler": ("scale_value",),
}


def from_jmp(loss_scale: Any) -> _results.Result:
  """The policy and state of a jmp or MindSpore loss scale.

  Both multiply the scale by a factor on the N-th finite step, and divide it by
  the same factor on an overflow. The floor of jmp is `min_loss_scale`, and that
  of MindSpore is 1.

  Args:
    loss_scale: jmp's `DynamicLossScale`, `StaticLossScale` or `NoOpLossScale`;
      MindSpore's `DynamicLossScaler` or `StaticLossScaler`. A jmp scale that
      has been through `jax.jit` has lost its `min_loss_scale`: it is 1 again,
      and is read as 1.

  Returns:
    `(policy, state)`. The objects hold the current scale, not the first one, so
    that `policy.init_scale` is the current one, too.

  Raises:
    TypeError: if the object is of another class, or an attribute of the wrong
      type.
    ValueError: if an attribute is missing or out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> class StaticLossScale:  # stands for the one of jmp
    ...   loss_scale = 128.0
    >>> interop.from_jmp(StaticLossScale())[0]
    FixedLossScale(scale=128.0)
  """
  name = type(loss_scale).__name__
  if name not in _CLASSES:
    raise TypeError(
      f"from_jmp: loss_scale must be one of {', '.join(_CLASSES)}, got"
      f" {_reading.show(loss_scale)}."
    )
  names = _CLASSES[name]
  values = _reading.read_attributes("from_jmp", name, loss_scale, names)
  values.complete()
  if not names:
    return _results.fixed(1.0)
  scale, *others = names
  if not others:
    return _results.fixed(values.scale(scale))
  count, interval, factor, *floors = others
  floor = values.scale(floors[0]) if floors else 1.0
  growth = values.growth(factor)
  policy = _policies.DynamicLossScale(
    init_scale=values.scale(scale, floor),
    growth_factor=growth,
    backoff_factor=1 / growth,
    growth_interval=values.count(interval),
    min_scale=floor,
  )
  return _results.resume(policy, values, scale, count)
