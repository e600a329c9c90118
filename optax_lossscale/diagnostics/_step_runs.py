"""The runs of a step with something changed, which several checks share."""

import bisect
from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any

import jax

from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _tracing,
)

# The largest decrease of a loss scale that is tried, as a power of two. It
# takes any scale of a policy to where float16 gradients underflow.
_MAX_LOG2_DECREASE = 64

# Takes the inputs of a program, and numbers that replace the values of tags.
RunFn = Callable[..., Sequence[Any]]
Replacements = Mapping[_outputs.TagGroup, float]


class StepRuns:
  """Runs a step with other inputs; nothing is compiled for it.

  Args:
    traced: the step.
    run: a function from its inputs, and the numbers that replace tagged values,
      to its outputs.
    outs: its outputs.

  The arguments are attributes, too.
  """

  def __init__(
    self, traced: _tracing.TracedFunction, run: RunFn, outs: Sequence[Any]
  ) -> None:
    self.traced, self.run, self.outs = traced, run, outs
    self._is_finite_by_decrease: dict[int, bool] = {}

  def with_lower_scale(self, factor: float) -> "StepRuns":
    """Return the runs of the step with lower loss scales."""
    inputs = self.traced.scale_inputs(factor)
    return StepRuns(
      self.traced._replace(inputs=inputs), self.run, self.run(inputs)
    )

  @functools.cached_property
  def updates(self) -> dict[int, _tracing.UpdateRecord]:
    """The record of each `update`, by the number of its call."""
    return self.traced.read_updates(self.outs)

  @functools.cached_property
  def overflow_outs(self) -> Sequence[Any] | None:
    """The outputs with loss scales of inf; None if the step raises an error."""
    return self.run_with_overflow(self.traced.scale_indices)

  @functools.cached_property
  def loss_scale_acts(self) -> bool:
    """Whether a loss scale among the arguments multiplies any gradient."""
    if not self.traced.scale_indices:
      return False
    outs = self.overflow_outs
    return outs is None or not has_finite_grads(self.traced, outs)

  @functools.cached_property
  def skipped_outs(self) -> Sequence[Any] | None:
    """The outputs if each `update` skips; None if the step raises an error."""
    if self.overflow_outs is None or not self._unscaled_grads:
      return self.overflow_outs
    return self.run_skipped({})

  def run_skipped(self, replaced: Replacements) -> Sequence[Any] | None:
    """Run the step with gradients that each `update` skips.

    The loss scales are inf, and gradients of ``jax.grad`` that no loss scale
    multiplies are NaN where they leave the backward pass.

    Args:
      replaced: the numbers that replace other tagged values.
    """
    factors = dict.fromkeys(self._unscaled_grads, math.nan)
    return self.run_with_overflow(
      self.traced.scale_indices, {**factors, **replaced}
    )

  @functools.cached_property
  def _unscaled_grads(self) -> list[_outputs.TagGroup]:
    """The gradients of ``jax.grad``, if loss scales of inf do not reach all."""
    assert self.overflow_outs is not None
    after = self.traced.read_updates(self.overflow_outs)
    if all(
      after[i].has_skipped or not update.has_run
      for i, update in self.updates.items()
    ):
      return []
    return [x for x in {*self.traced.tags.values()} if x.kind == "backward"]

  def run_with_overflow(
    self, indices: Sequence[int], replaced: Replacements | None = None
  ) -> Sequence[Any] | None:
    """Run the step with inf as some of its loss scales.

    Args:
      indices: the inputs that become inf.
      replaced: the numbers that replace tagged values.

    Returns:
      Its outputs; None if it raises an error then.
    """
    inputs = self.traced.scale_inputs(math.inf, indices)
    try:
      # Wait for the results, since an error of a callback is raised with them.
      return jax.block_until_ready(self.run(inputs, replaced))
    except Exception:  # JAX raises errors of callbacks as several types.
      return None

  def run_with_factor(self, factor: Any) -> Sequence[Any]:
    """Run the step with all loss scales times a factor."""
    return self.run(self.traced.scale_inputs(factor))

  def run_replaced(self, replaced: Replacements) -> Sequence[Any]:
    """Run the step with numbers in place of tagged values."""
    return self.run(self.traced.inputs, replaced)

  def has_finite_grads_at(self, log2_decrease: int) -> bool:
    """Return whether the gradients are finite with a lower loss scale."""
    known = self._is_finite_by_decrease
    if log2_decrease not in known:
      outs = self.run_with_factor(2.0**-log2_decrease)
      known[log2_decrease] = has_finite_grads(self.traced, outs)
    return known[log2_decrease]


def has_finite_grads(
  traced: _tracing.TracedFunction, outs: Sequence[Any]
) -> bool:
  """Return whether all gradients are finite."""
  return _host_values.all_finite(
    traced.select_kind(outs, "grads") + traced.select_kind(outs, "unscaled")
  )


def find_log2_decrease(is_enough: Callable[[int], bool]) -> int | None:
  """Return the smallest decrease of the loss scale that is enough.

  Args:
    is_enough: takes log2 of the factor by which the scale decreases, and
      returns whether the step is finite then. It is not finite with 0.

  Returns:
    log2 of the factor; None if there is none.
  """
  # The step is not finite with `low`, and finite with `high`.
  low, high = 0, 1
  while not is_enough(high):
    if high == _MAX_LOG2_DECREASE:
      return None
    low, high = high, 2 * high
  return bisect.bisect_left(range(high), True, lo=low + 1, key=is_enough)
