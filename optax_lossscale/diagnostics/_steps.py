"""What reports tell of a training step as a whole, in sentences.

Whether the gradients that ``update`` is given are those of a scaled loss, and
unscaled once; whether ``update`` ran; whether an overflow is hidden from it.
"""

from collections.abc import Sequence
import re
from typing import Any

import numpy as np

from optax_lossscale import _jaxprs, _judged

_NOT_SCALED = (
  "The gradients that update is given come from no scaled loss: differentiate"
  " with ols.value_and_grad(loss_fn, opt_state), unless the scale is fixed at"
  " 1."
)
_TWICE = (
  "The gradients that update is given were unscaled twice: value_and_grad and"
  " grad return true gradients, which need no unscale_grads and no"
  " grads_are_scaled=True."
)
_NEVER = (
  "The gradients that update is given were never unscaled: call unscale_grads,"
  " or make the optimizer with grads_are_scaled=True."
)
_HIDDEN = (
  "Something between hides an overflow from update: the gradients that were"
  " computed are not finite, and those that update is given are. So the step is"
  " applied to what is left, and the loss scale never comes down. Give update"
  " the gradients as they are."
)

# How a state of the loss scale among the arguments is written.
_LOSS_SCALE = re.compile(r"\.loss_scale(\.value|\[.*\])?$")


def scaling_of(closed: _jaxprs.ClosedJaxpr, names: Sequence[str]) -> list[str]:
  """What is wrong with how the gradients of a step are scaled, if it is known.

  Args:
    closed: the jaxpr of the step.
    names: how its inputs are named.

  Returns:
    Sentences; none if nothing is wrong, or if it cannot be known, as of
    gradients that are arguments.
  """
  told: dict[str, None] = {}

  def named(name: str, power: _jaxprs.Power) -> _jaxprs.Power:
    mark = _judged.mark_of(name)
    if mark is None:
      return power
    if mark.kind == "scale":
      return _jaxprs.Power(1)
    if mark.kind in ("grads", "scaled_grads"):
      told.update(dict.fromkeys(_mistake(power, mark.kind == "scaled_grads")))
      return _jaxprs.Power()  # What follows is another step.
    return power

  inputs = [
    _jaxprs.Power(1 if _LOSS_SCALE.search(name) else 0) for name in names
  ]
  _jaxprs.powers_of(closed, inputs, named)
  return list(told)


def _mistake(power: _jaxprs.Power, is_scaled: bool) -> list[str]:
  """What is wrong with a gradient; nothing if it is right, or not known."""
  if not power.is_gradient or not isinstance(power.exponent, int):
    return []
  if not power.is_scaled and power.exponent <= 0:
    return [_NOT_SCALED]
  over = power.exponent - is_scaled
  return [_NEVER] if over > 0 else [_TWICE] if over < 0 else []


def running(flags: Sequence[Any], faults: Sequence[Any]) -> list[str]:
  """What a step that was run tells: did ``update`` run, and did it see all.

  Args:
    flags: for each ``update``, whether it was applied: 1, 0, or -1 if it did
      not run; an array where it stands in a loop, or on several devices.
    faults: for what was unscaled, a number that is not finite if it is not.

  Returns:
    Sentences; none if all is well.
  """
  flags = [np.asarray(flag) for flag in flags]
  if not flags:
    return []
  told = []
  count = sum(flag.size for flag in flags)
  missed = sum(int(np.sum(flag < 0)) for flag in flags)
  if missed:
    often = "" if missed == count else f" {missed} times of {count}"
    told.append(f"update did not run{often} in this step.")
  # Iteration by iteration, if all stand in the same loops.
  shapes = {flag.shape for flag in flags}
  shape = shapes.pop() if len(shapes) == 1 else ()
  sees_all = np.ones(shape, bool)
  for flag in flags:
    sees_all &= _over_the_rest(np.all, flag == 1, shape)
  overflows = np.zeros(shape, bool)
  for fault in faults:
    overflows |= _over_the_rest(np.any, ~np.isfinite(np.asarray(fault)), shape)
  return [*told, _HIDDEN] if (overflows & sees_all).any() else told


def _over_the_rest(reduce: Any, x: np.ndarray, shape: tuple[int, ...]) -> Any:
  """The array reduced to its first axes, if these have the shape."""
  first = len(shape) if x.shape[: len(shape)] == shape else 0
  return reduce(x, axis=tuple(range(first, x.ndim)))
