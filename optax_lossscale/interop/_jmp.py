"""Imports the loss scales of jmp, and MindSpore's, which have jmp's design."""

from typing import Any

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import FieldSpec

# The attributes of each class, by class name.
_CLASS_FIELDS = {
  "DynamicLossScale": {
    "loss_scale": FieldSpec("loss_scale"),
    "counter": FieldSpec("finite_count"),
    "period": FieldSpec("growth_interval"),
    "factor": FieldSpec("growth_factor"),
    "min_loss_scale": FieldSpec("min_scale"),
  },
  "StaticLossScale": {"loss_scale": FieldSpec("scale")},
  "DynamicLossScaler": {
    "scale_value": FieldSpec("loss_scale"),
    "counter": FieldSpec("finite_count"),
    "scale_window": FieldSpec("growth_interval"),
    "scale_factor": FieldSpec("growth_factor"),
    # MindSpore has no such attribute: its minimum is always 1.
    "min_loss_scale": FieldSpec("min_scale", 1.0),
  },
  "StaticLossScaler": {"scale_value": FieldSpec("scale")},
}


@_transfer_guard.allow_transfers
def from_jmp(loss_scale: Any) -> _results.PolicyAndState:
  """The policy and state of a jmp or MindSpore loss scale.

  Both multiply the scale by a factor on the N-th finite step, and divide it by
  the same factor on an overflow. The minimum scale of jmp is `min_loss_scale`,
  and the minimum scale of MindSpore is 1.

  Args:
    loss_scale: jmp's `DynamicLossScale`, `StaticLossScale` or `NoOpLossScale`;
      MindSpore's `DynamicLossScaler` or `StaticLossScaler`. A jmp scale that
      has been through `jax.jit` has lost its `min_loss_scale`: it is 1 again,
      and is read as 1.

  Returns:
    `(policy, state)`. The objects hold the current scale and not the initial
    one, so `policy.init_scale` is the current scale, too.

  Raises:
    TypeError: if the object is of another class, or an attribute of the wrong
      type.
    ValueError: if an attribute is missing or out of range.

  Examples:
    >>> from optax_lossscale import interop
    >>> class StaticLossScale:  # in place of jmp.StaticLossScale
    ...   loss_scale = 128.0
    >>> interop.from_jmp(StaticLossScale())[0]
    FixedLossScale(scale=128.0)
  """
  caller, class_name = "from_jmp", type(loss_scale).__name__
  if class_name == "NoOpLossScale":
    return _results.initial_result(_policies.FixedLossScale(1.0))
  if class_name not in _CLASS_FIELDS:
    raise TypeError(
      f"from_jmp: loss_scale must be one of {', '.join(_CLASS_FIELDS)} and"
      f" NoOpLossScale, got {_reading.safe_repr(loss_scale)}."
    )
  values = _reading.read_fields(
    caller, class_name, loss_scale, _CLASS_FIELDS[class_name]
  )
  if "scale" in values:
    return _results.initial_result(_policies.FixedLossScale(values["scale"]))
  backoff_factor = 1 / values["growth_factor"]
  policy = _results.make_dynamic_policy(values, backoff_factor=backoff_factor)
  return _results.resumed_result(caller, policy, values)
