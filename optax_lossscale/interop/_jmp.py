"""Imports the loss scales of jmp."""

from typing import Any

from optax_lossscale import _policies, _transfer_guard
from optax_lossscale.interop import _reading
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
}


@_transfer_guard.allow_transfers
def from_jmp(loss_scale: Any) -> _reading.PolicyAndState:
  """The policy and state of a jmp loss scale.

  jmp multiplies the scale by a factor on the N-th finite step, and divides it
  by the same factor on an overflow, down to `min_loss_scale`.

  Args:
    loss_scale: a `DynamicLossScale`, `StaticLossScale` or `NoOpLossScale`. A
      `DynamicLossScale` that has been through `jax.jit` has lost its
      `min_loss_scale`: it is 1 again, and is read as 1.

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
    return _reading.initial_result(_policies.FixedLossScale(1.0))
  if class_name not in _CLASS_FIELDS:
    raise TypeError(
      f"from_jmp: loss_scale must be one of {', '.join(_CLASS_FIELDS)} and"
      f" NoOpLossScale, got {_reading.safe_repr(loss_scale)}."
    )
  values = _reading.read_fields(
    caller, class_name, loss_scale, _CLASS_FIELDS[class_name]
  )
  if "scale" in values:
    return _reading.initial_result(_policies.FixedLossScale(values["scale"]))
  backoff_factor = 1 / values["growth_factor"]
  policy = _reading.make_dynamic_policy(values, backoff_factor=backoff_factor)
  return _reading.resumed_result(caller, policy, values)
