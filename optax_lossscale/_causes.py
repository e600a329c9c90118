"""Why steps were skipped, in words, and what to do."""

from typing import Any

import numpy as np

from optax_lossscale import _policies

_CURE_OVERFLOW = (
  "lower min_scale of the policy, or compute the layer that overflows in"
  " float32 or bfloat16"
)
_CURE_NAN = (
  "no loss scale can cure it: look for it in the data, in activations that"
  " overflow in the forward pass, or in too large a learning rate"
)
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
  floor, _ = _policies.bounds(policy)
  # The floor may be no float32 number, but the scale is.
  if floor is not None and scale <= np.float32(floor):
    return _at_floor(scale, floor, nonfinite)
  can_fall = _above_floor(scale, floor, policy)
  if nonfinite is None:
    return [*can_fall, "Pass grads to see what is not finite."]
  if _are_all_nan(nonfinite):
    can_fall.append(f"If a NaN is the model's own, {_CURE_NAN}.")
  return [*can_fall, _LEAVES]


def _at_floor(
  scale: float, floor: float, nonfinite: list[Any] | None
) -> list[str]:
  at_floor = (
    f"The loss scale is {scale:g}, the lowest allowed (min_scale ="
    f" {float(floor):g}), and gradients"
  )
  if nonfinite is None:
    return [
      f"{at_floor} still overflow or are NaN.",
      "Pass grads to see which.",
      f"If they overflow, {_CURE_OVERFLOW}.",
      f"If they are NaN, {_CURE_NAN}.",
    ]
  # An overflow makes an inf first, and a NaN only where infs meet later. So if
  # there are only NaNs at the floor, they come from elsewhere.
  if _are_all_nan(nonfinite):
    return [
      f"{at_floor} are NaN, none of them infinite; {_CURE_NAN}.",
      "These leaves are NaN:",
    ]
  return [f"{at_floor} still overflow: {_CURE_OVERFLOW}.", _LEAVES]


def _above_floor(
  scale: float, floor: float | None, policy: _policies.LossScalePolicy | None
) -> list[str]:
  now = f"The loss scale is {scale:g}"
  if policy is None:
    return [f"{now}.", "Pass policy to learn whether it can still come down."]
  if isinstance(policy, _policies.FixedLossScale):
    return [f"{now}, and fixed.", "Use DynamicLossScale, or a lower scale."]
  if floor is not None:
    now += f", above the lowest allowed (min_scale = {float(floor):g})"
  return [
    f"{now}.",
    "If it is still coming down, start it lower or allow more skips.",
    "If it is not, compute the layer that overflows in float32 or bfloat16.",
  ]


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


def _are_all_nan(nonfinite: list[Any]) -> bool:
  return not any(leaf.inf_count for leaf in nonfinite)
