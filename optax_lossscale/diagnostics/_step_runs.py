"""The runs of a step with something changed, which several checks share."""

import bisect
from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _outputs,
  _tracing,
)

# The largest decrease of a loss scale that is tried, as a power of two. It
# takes any scale of a policy to where float16 gradients underflow.
_MAX_LOG2_DECREASE = 64

# The numbers that replace the values of tags.
Replacements = Mapping[_outputs.TagGroup, float]


class UpdateRecord(NamedTuple):
  """A call of `update` in a run, as arrays on the host.

  Those of a loop are stacked.

  Attributes:
    applied: 1 or 0, or -1 if the call did not run.
    update_scale: the loss scale that it received.
    new_scale: the loss scale that it returned.
    new_skip_count: the number of skipped steps that it returned.
  """

  applied: np.ndarray
  update_scale: np.ndarray
  new_scale: np.ndarray
  new_skip_count: np.ndarray

  @property
  def has_run(self) -> bool:
    """Whether it ran."""
    return bool((self.applied >= 0).any())

  @property
  def has_skipped(self) -> bool:
    """Whether it skipped a step."""
    return bool((self.applied == 0).any())


class StateRecord(NamedTuple):
  """A loss-scale state that a step returned, as arrays on the host.

  Attributes:
    calls: the calls of `update` whose loss scale may have reached it.
    scale: its loss scale.
    skip_count: its number of skipped steps.
  """

  calls: frozenset[int]
  scale: np.ndarray
  skip_count: np.ndarray


class Run:
  """A run of a step.

  Args:
    traced: the step.
    outs: its outputs.

  The arguments are attributes, too.
  """

  def __init__(
    self, traced: _tracing.TracedFunction, outs: Sequence[Any]
  ) -> None:
    self.traced, self.outs = traced, outs

  @functools.cached_property
  def updates(self) -> dict[int, UpdateRecord]:
    """The record of each call of `update`, by its number."""
    values: dict[int, dict[str, Any]] = {}
    for output, x in zip(self.traced.outputs, self.outs, strict=True):
      if output.kind in UpdateRecord._fields:
        values.setdefault(output.group, {})[output.kind] = x
    return {
      call: UpdateRecord(**record)
      for call, record in _host_values.to_host(values).items()
      if len(record) == len(UpdateRecord._fields)
    }

  @functools.cached_property
  def states(self) -> list[StateRecord]:
    """The loss-scale states among the results."""
    calls = [x.new_scales for x in self.traced.list_outputs("state_scale")]
    fields = self.select("state_scale"), self.select("state_skip_count")
    return list(map(StateRecord, calls, *_host_values.to_host(fields)))

  @functools.cached_property
  def has_finite_grads(self) -> bool:
    """Whether all gradients are finite."""
    return _host_values.all_finite(
      self.select("grads") + self.select("unscaled")
    )

  def select(self, kind: str, group: int | None = None) -> list[Any]:
    """Return the values of the outputs of one kind, or of a group of it."""
    return [
      x
      for output, x in zip(self.traced.outputs, self.outs, strict=True)
      if output.kind == kind and group in (None, output.group)
    ]


class StepRuns:
  """Runs a step with other inputs; nothing is compiled for it.

  Args:
    traced: the step.
    run_program: a function from its inputs, and the numbers that replace tagged
      values, to its outputs.
    outs: its outputs.

  Attributes:
    traced: the step.
    base: its run with its inputs.
  """

  def __init__(
    self,
    traced: _tracing.TracedFunction,
    run_program: Callable[[Sequence[Any], Replacements], Sequence[Any]],
    outs: Sequence[Any],
  ) -> None:
    self.traced, self._run_program = traced, run_program
    self.base = Run(traced, outs)
    self._is_finite_by_decrease: dict[int, bool] = {}

  def run(
    self, inputs: Sequence[Any], replaced: Replacements | None = None
  ) -> Run:
    """Run the step.

    Args:
      inputs: its inputs.
      replaced: the numbers that replace tagged values.
    """
    return Run(self.traced, self._run_program(inputs, replaced or {}))

  def with_lower_scale(self, factor: float) -> "StepRuns":
    """Return the runs of the step with lower loss scales."""
    inputs = self.traced.scale_inputs(factor)
    traced = self.traced._replace(inputs=inputs)
    return StepRuns(traced, self._run_program, self.run(inputs).outs)

  @functools.cached_property
  def overflow(self) -> Run | None:
    """The run with loss scales of inf; None if the step raises an error."""
    return self.run_with_overflow(self.traced.scale_indices)

  @functools.cached_property
  def loss_scale_acts(self) -> bool:
    """Whether a loss scale among the arguments multiplies any gradient."""
    if not self.traced.scale_indices:
      return False
    return self.overflow is None or not self.overflow.has_finite_grads

  @functools.cached_property
  def skipped(self) -> Run | None:
    """The run if each `update` skips; None if the step raises an error."""
    if self.overflow is None or not self._unscaled_grads:
      return self.overflow
    return self.run_skipped({})

  def run_skipped(self, replaced: Replacements) -> Run | None:
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
    assert self.overflow is not None
    after = self.overflow.updates
    if all(
      after[i].has_skipped or not update.has_run
      for i, update in self.base.updates.items()
    ):
      return []
    return [x for x in {*self.traced.tags.values()} if x.kind == "backward"]

  def run_with_overflow(
    self, indices: Sequence[int], replaced: Replacements | None = None
  ) -> Run | None:
    """Run the step with inf as some of its loss scales.

    Args:
      indices: the inputs that become inf.
      replaced: the numbers that replace tagged values.

    Returns:
      The run; None if it raises an error.
    """
    try:
      run = self.run(self.traced.scale_inputs(math.inf, indices), replaced)
      # Wait for the results, since an error of a callback is raised with them.
      jax.block_until_ready(run.outs)
    except Exception:  # JAX raises errors of callbacks as several types.
      return None
    return run

  def run_with_factor(self, factor: float) -> Run:
    """Run the step with all loss scales times a factor."""
    return self.run(self.traced.scale_inputs(factor))

  def has_finite_grads_at(self, log2_decrease: int) -> bool:
    """Return whether the gradients are finite with a lower loss scale."""
    known = self._is_finite_by_decrease
    if log2_decrease not in known:
      run = self.run_with_factor(2.0**-log2_decrease)
      known[log2_decrease] = run.has_finite_grads
    return known[log2_decrease]


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
