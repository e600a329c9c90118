"""Detect mistakes in how a training step scales and passes its gradients.

* ``check_hidden_overflow`` reads flags of a run: ``update`` received each
  nonfinite gradient that ``value_and_grad`` returned.
* ``ScaleRuns`` runs the step with other loss scales: a gradient that is
  unscaled exactly once stays the same.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _host_values,
  _reports,
  _step_runs,
  _tracing,
)

_NEVER_UNSCALED = _reports.Problem(
  "update{update} received gradients{names} that were never unscaled: they"
  " halve if the loss scale halves.",
  "Call ols.unscale_grads(grads, opt_state), or create the optimizer with"
  " grads_are_scaled=True.",
)
_UNSCALED_TWICE = _reports.Problem(
  "update{update} received gradients{names} that double if the loss scale"
  " halves: they were unscaled twice, or clipped while they were scaled, as by"
  " a custom derivative, or the scaled loss was divided by its own value.",
  "Drop unscale_grads and grads_are_scaled=True, since ols.value_and_grad and"
  " ols.grad return unscaled gradients. Clip inside of with_loss_scaling, not"
  " in a custom derivative, and scale the loss last.",
)
_DEPENDS_ON_SCALE = _reports.Problem(
  "update{update} received gradients{names} that depend on the loss scale: they"
  " change by a factor of {factor:.3g} if the scale is multiplied by"
  " 2**{log2_scale}. Something is added to, or cut off from, the loss or the"
  " gradients while they are scaled.",
  "Change them after ols.value_and_grad has unscaled them.",
)
_TWO_STATES = _reports.Problem(
  "update{update} received gradients{names} that one loss-scale state scaled"
  " and another one unscaled: they change if one of the two scales changes.",
  "Pass the same opt_state to ols.scale_loss and ols.unscale_grads, or"
  " differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
UPDATE_NOT_RUN = _reports.Problem(
  "update did not run in this step, since its branch was not taken.",
  "Pass arguments with which the branch is taken. If the branch tests whether"
  " the gradients are finite, call update outside of it, since"
  " with_loss_scaling skips bad steps.",
)
_HIDDEN_OVERFLOW = _reports.Problem(
  "An overflow is hidden from update: value_and_grad returned gradients with"
  " an inf or a NaN, but update received finite ones. Something in between"
  " (nan_to_num, clipping, a mask) replaces them, so bad steps are applied and"
  " the loss scale never decreases.",
  "Pass the gradients to update unchanged.",
)
NEEDLESS_SKIP = _reports.Problem(
  "update skips this step although its gradients are finite.",
  "If you pass grads_finite= to update, check its value: False skips the step."
  " Otherwise the sum of the gradients exceeds the range of float32.",
)

# The largest relative distance of a measured ratio of gradients from a power of
# two, and of a gradient that is computed without half precision from itself.
_RATIO_TOLERANCE = 0.05
_EXACT_TOLERANCE = 1e-3
# At the default loss scale, a term that is added to the scaled loss is too
# small to be noticed. With these factors its relative size changes the most.
_FAR_LOG2_SCALES = (-16, -8, 8)


def check_hidden_overflow(run: _step_runs.Run) -> list[_reports.Problem]:
  """Check that no overflow is hidden from the updates that ran in a step."""
  has_overflow = not _host_values.all_finite(run.select("unscaled"))
  # If any `update` skipped its step, it may have received the overflow. If one
  # did not run, such as behind an accumulation, it may receive the overflow in
  # a later step. So the overflow is only hidden if all updates were applied.
  is_applied = all((x.applied == 1).all() for x in run.updates.values())
  is_hidden = bool(run.updates) and has_overflow and is_applied
  return [_HIDDEN_OVERFLOW] if is_hidden else []


class ScaleRuns:
  """Runs of a step that show how its gradients change with a loss scale.

  A run with the same inputs finds gradients that differ without a reason, such
  as rounding noise, or gradients of another batch: they are not judged.

  Args:
    traced: the step.
    ratios: for each gradient to judge, by the index of its output, the factor
      by which a sound gradient changes if the loss scale halves.
    run_step: a function from the inputs of the step to its outputs, which have
      an item for each gradient.
    outs: the outputs of the step.
    is_exact: whether gradients cannot underflow, as in a step without half
      precision. Only then are ratios reported that are not powers of two.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    ratios: Mapping[int, float],
    run_step: Callable[[list[Any]], Any],
    outs: Any,
    *,
    is_exact: bool,
  ) -> None:
    self._traced, self._ratios, self._run_step = traced, ratios, run_step
    self._outs, self._is_exact = outs, is_exact

  def check_invariance(self) -> list[_reports.Problem]:
    """Check that no gradient depends on the loss scale.

    The step runs with a half and with a quarter of each loss scale. Both are
    needed to distinguish a mistake from gradients that underflow. If gradients
    cannot underflow, it also runs with scales that are far away.
    """
    flow, scales = self._traced.flow, self._traced.scale_indices
    if not self._ratios or not scales:
      return []
    # A sum of scaled gradients of earlier calls changes with the loss scale.
    sums = [
      i
      for i in flow.before_gradients - flow.in_loss
      if _arrays.is_inexact(self._traced.inputs[i])
    ]
    mistakes = list(self._judge(scales))
    return [*self._judge([*scales, *sums])] and mistakes if sums else mistakes

  def check_states(self) -> list[_reports.Problem]:
    """Check that no single one of several loss scales changes a gradient."""
    scales = self._traced.scale_indices
    affected: set[int] = set()
    for i in scales if self._ratios and len(scales) > 1 else ():
      ratios = self._measure(-1, [i])
      affected |= {
        k for k, x in ratios.items() if is_power(x, 1) or is_power(x, -1)
      }
    return list(
      repeat_by_update(self._traced, _TWO_STATES, affected, self._ratios)
    )

  def _judge(self, scaled_inputs: Sequence[int]) -> Iterator[_reports.Problem]:
    """Yield mistakes that explain how gradients change with these inputs."""
    repeat = functools.partial(repeat_by_update, self._traced)
    halved, quartered = (self._measure(k, scaled_inputs) for k in (-1, -2))
    explained: set[int] = set()
    for mistake, power in (_NEVER_UNSCALED, 1), (_UNSCALED_TWICE, -1):
      affected = {
        i
        for i in self._ratios
        if is_power(halved[i], power) and is_power(quartered[i], 2 * power)
      }
      explained |= affected
      yield from repeat(mistake, affected, self._ratios)
    for log2_scale in (-1, -2, *_FAR_LOG2_SCALES) if self._is_exact else ():
      ratios = self._measure(log2_scale, scaled_inputs)
      affected = {
        i for i, x in ratios.items() if abs(x - 1) > _EXACT_TOLERANCE
      } - explained
      explained |= affected
      yield from repeat(
        _DEPENDS_ON_SCALE,
        affected,
        self._ratios,
        log2_scale=log2_scale,
        factor=max((ratios[i] for i in affected), default=0.0),
      )

  def _measure(
    self, log2_scale: int, scaled_inputs: Sequence[int]
  ) -> dict[int, float]:
    """Return how much gradients change if inputs are multiplied.

    The factor is over the one of a sound gradient. It is NaN if it is unknown.
    """
    changes = self._compare(log2_scale, scaled_inputs)[:, 0]
    ratios = np.array([*self._ratios.values()])
    factors = np.where(self._is_stable, changes * ratios**log2_scale, np.nan)
    return dict(zip(self._ratios, factors.tolist(), strict=True))

  @functools.cached_property
  def _is_stable(self) -> np.ndarray:
    """Whether each gradient is the same in another run; bool[gradients]."""
    mask: np.ndarray = self._compare(0, ())[:, 1] < _EXACT_TOLERANCE
    return mask

  def _compare(
    self, log2_scale: int, scaled_inputs: Sequence[int]
  ) -> np.ndarray:
    """Return the ratio and the error of each gradient; float64[gradients, 2].

    Args:
      log2_scale: log2 of the factor on the inputs.
      scaled_inputs: the inputs that are multiplied.
    """
    inputs = self._traced.scale_inputs(2.0**log2_scale, scaled_inputs)
    outs = self._run_step(inputs)
    rows = [_measure_change(self._outs[i], outs[i]) for i in self._ratios]
    return np.array(_host_values.to_host(rows), np.float64)


@_host_values.jit_quickly
def _measure_change(x: Any, y: Any) -> jax.Array:
  """Return the factor by which a gradient changed, and the relative error.

  The factor is the projection onto the old gradient. Both are NaN for a
  gradient that is zero or not finite.
  """
  # Normalize, so that squares stay in range. A zero gradient gives NaN.
  amax = jnp.max(jnp.abs(x), initial=0)
  x, y = x / amax, y / amax
  norm = jnp.sum(jnp.abs(x) ** 2)
  error = jnp.sqrt(jnp.sum(jnp.abs(y - x) ** 2) / norm)
  return jnp.stack([jnp.sum(jnp.real(x.conj() * y)) / norm, error])


def measure_ratio(x: Any, y: Any) -> float:
  """Return the factor by which a gradient changed."""
  return float(_host_values.to_host(_measure_change(x, y))[0])


def is_power(ratio: float, power: int) -> bool:
  """Return whether a ratio is a power of a half but for rounding errors."""
  return abs(ratio * 2.0**power - 1) < _RATIO_TOLERANCE


def repeat_by_update(
  traced: _tracing.TracedFunction,
  mistake: _reports.Problem,
  affected: Collection[int],
  grads: Collection[int],
  **kwargs: Any,
) -> Iterator[_reports.Problem]:
  """Yield the mistake for each `update` that receives affected gradients.

  Args:
    traced: the step.
    mistake: the mistake, without names.
    affected: the indices of the outputs that are affected gradients.
    grads: those of all gradients that were judged.
    **kwargs: further parts of the text.
  """
  outputs = {i: traced.outputs[i] for i in grads}
  for group in dict.fromkeys(x.group for x in outputs.values()):
    names = {i: x.name for i, x in outputs.items() if x.group == group}
    affected_names = [name for i, name in names.items() if i in affected]
    if affected_names:
      yield _reports.fill_in_names(
        mistake,
        affected_names,
        [*names.values()],
        update=name_update(traced, group),
        **kwargs,
      )


def name_update(traced: _tracing.TracedFunction, call: int) -> str:
  """Return the number of an `update`; empty if a step has only one."""
  calls = {output.group for output in traced.grad_outputs}
  return f" [{call}]" * (len(calls) > 1)
