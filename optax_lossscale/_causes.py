"""Why steps were skipped, in words, and what to do."""

from typing import Any

import numpy as np

from optax_lossscale import _policies

_LEAVES = "These leaves are not finite:"


def in_a_row(
  scale: float,
  policy: _policies.LossScalePolicy | None,
  nonfinite: list[Any] | None,
) -> list[str]:
  """Why steps in a row were skipped, as far as it is known, and what to do.

  Args:
    scale: the loss scale.
    policy: what moves it, if that is known.
    nonfinite: the leaves that are not finite; None if there are no gradients.

  Returns:
    Sentences, of which the last one leads to the leaves if there are any.
  """
  if nonfinite == []:
    return [
      "The gradients given are finite.",
      "If they are those of the last step, the reason is grads_finite=,"
      " check_updates=True or another device.",
    ]
  return [
    f"The loss scale is {scale:g}{_and_can_fall(scale, policy)}",
    "If gradients overflow there, compute the layer that overflows in float32"
    " or bfloat16.",
    "If they are NaN without an overflow, no loss scale can cure it: look for"
    " it in the data, in activations that overflow in the forward pass, or in"
    " too large a learning rate.",
    "Pass grads to see which." if nonfinite is None else _LEAVES,
  ]


def _and_can_fall(
  scale: float, policy: _policies.LossScalePolicy | None
) -> str:
  """The end of a sentence: whether the scale can still come down."""
  floor, _ = _policies.bounds(policy)
  # The floor may be no float32 number, but the scale is.
  if floor is not None and scale <= np.float32(floor):
    bound = f"min_scale = {float(floor):g}"
    return f", the lowest allowed ({bound}): lower min_scale of the policy."
  if policy is None:
    return ". Pass policy to learn whether it can still come down."
  if isinstance(policy, _policies.FixedLossScale):
    return ", and fixed. Use DynamicLossScale, or a lower scale."
  return ". If it is still coming down, start it lower or allow more skips."


def in_all(scale: float, nonfinite: list[Any] | None) -> list[str]:
  """The same of many skips that are not in a row."""
  return [
    f"The loss scale is {scale:g}.",
    "Log it to see why.",
    "If steps are skipped after it rose, it rises too far or too often: lower"
    " max_scale of the policy, or use DynamicLossScale with a longer"
    " growth_interval.",
    "If not, look for batches whose gradients are NaN or far larger than those"
    " of others.",
    *([_LEAVES] if nonfinite else []),
  ]
