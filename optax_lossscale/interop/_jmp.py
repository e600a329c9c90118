"""The loss scales of jmp, and MindSpore's, which are shaped after them."""

from typing import Any

from optax_lossscale import _transfer_guard
from optax_lossscale.interop import _reading, _results
from optax_lossscale.interop._reading import FieldSpec

# The attributes of each class, by its name.
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
    "min_loss_scale": FieldSpec("min_scale", 1.0),  # It has no such attribute.
  },
  "StaticLossScaler": {"scale_value": FieldSpec("scale")},
}


@_transfer_guard.allow_transfers
def from_jmp(loss_scale: Any) -> _results.PolicyAndState:
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
  caller, class_name = "from_jmp", type(loss_scale).__name__
  if class_name == "NoOpLossScale":
    return _results.fixed_result(1.0)
  if class_name not in _CLASS_FIELDS:
    raise TypeError(
      f"from_jmp: loss_scale must be one of {', '.join(_CLASS_FIELDS)} and"
      f" NoOpLossScale, got {_reading.safe_repr(loss_scale)}."
    )
  values = _reading.read_fields(
    caller, class_name, loss_scale, _CLASS_FIELDS[class_name]
  )
  if "scale" in values:
    return _results.fixed_result(values["scale"])
  backoff_factor = 1 / values["growth_factor"]
  policy = _results.make_dynamic_policy(values, backoff_factor=backoff_factor)
  return _results.resumed_result(caller, policy, values)
