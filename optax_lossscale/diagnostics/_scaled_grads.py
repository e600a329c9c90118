"""Which loss scale multiplies each gradient that ``update`` receives?

The step runs with inf as one loss scale after the other: a gradient that stays
finite was not multiplied by this scale. It also runs with the gradients that
``value_and_grad`` returns times a small number: if ``update`` receives zeros
then, they were cast to half precision.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _reports,
  _scaling_mistakes,
  _step_runs,
  _tracing,
)

_NOT_SCALED = _reports.Problem(
  "update{update} received gradients of an unscaled loss{names}, so small"
  " float16 gradients underflow.",
  "Differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
_OTHER_STATE = _reports.Problem(
  "update{update} received gradients{names} that the state of another optimizer"
  " scaled, so its own loss scale does not act and falls with each overflow of"
  " the other.",
  "Pass the state of the same optimizer to ols.value_and_grad(loss_fn,"
  " opt_state).",
)
_CONSTANT_SCALE = _reports.Problem(
  "update{update} received gradients{names} that a constant loss scale scaled,"
  " so the loss scale of the optimizer does not act and falls with each"
  " overflow.",
  "Pass the current opt_state to ols.value_and_grad(loss_fn, opt_state), inside"
  " of the step.",
)
_CAST_TO_HALF = _reports.Problem(
  "update{update} received gradients{names} that were cast to half precision"
  " after they were unscaled, so small ones are zero.",
  "Keep true gradients in float32, and add up micro-batches in float32.",
)
_NEVER_MULTIPLIED = _reports.Problem(
  "update{update} received gradients{names} that are divided by the loss scale,"
  " but the backward pass does not multiply them by it: they are zero if it is"
  " inf. The backward pass ignores the cotangent, as a custom_vjp with a wrong"
  " rule does, or the scaled loss is divided by its own value.",
  "Multiply by the cotangent in the backward rule of the loss, and scale the"
  " loss last: ols.value_and_grad(loss_fn, opt_state).",
)
_TWO_STATES = _reports.Problem(
  "update{update} received gradients{names} that one loss-scale state scaled"
  " and another one unscaled: they change if one of the two scales changes.",
  "Pass the same opt_state to ols.scale_loss and ols.unscale_grads, or"
  " differentiate with ols.value_and_grad(loss_fn, opt_state).",
)
_CHAINED_WRAPPERS = _reports.Problem(
  "update [{second}] receives the updates of update [{first}] as gradients: two"
  " wrappers are in one chain, and each of them has a loss scale.",
  "Wrap the chain once: ols.with_loss_scaling(optax.chain(first, second)).",
)

# With this factor, gradients are zero in float16, and normal in float32, even
# if they are unscaled three times.
_SMALL = 2.0**-40


class ScaledGrads(NamedTuple):
  """The loss scales of the gradients of a step.

  Attributes:
    ratios: for each gradient that a loss scale among the arguments multiplies,
      by the index of its output, the factor by which a sound gradient changes
      if the loss scale halves.
    mistakes: mistakes in how gradients are scaled.
    is_known: whether these are all gradients that are not zero.
  """

  ratios: dict[int, float]
  mistakes: list[_reports.Problem]
  is_known: bool


def find_scaled_grads(runs: _step_runs.StepRuns) -> ScaledGrads:
  """Find out by which loss scale each gradient of a step is multiplied.

  Nothing is known of a gradient that is zero, or if any is not finite.

  Args:
    runs: the runs of the step.
  """
  traced = runs.traced
  has_grads = bool(traced.grad_outputs)
  if not has_grads or not _step_runs.has_finite_grads(traced, runs.outs):
    return ScaledGrads({}, [], False)
  experiment = _Experiment(runs)
  ratios = {
    i: 0.5 if traced.outputs[i].tag_kind == "scaled_grads" else 1.0
    for i, scales in experiment.scales_by_grad.items()
    if scales
  }
  mistakes = dict.fromkeys(experiment.find_mistakes())
  is_known = len(ratios) == len(experiment.scales_by_grad)
  return ScaledGrads(ratios, list(mistakes), is_known)


class _Experiment:
  """The runs with changed loss scales and gradients, and what they show.

  Attributes:
    scales_by_grad: for each gradient that is not zero, by the index of its
      output, the indices of the inputs that are its loss scales.
  """

  def __init__(self, runs: _step_runs.StepRuns) -> None:
    self._runs, self._traced = runs, runs.traced
    self._grads = {
      i: output
      for i, output in enumerate(runs.traced.outputs)
      if output.kind == "grads"
      and output.group in runs.updates
      and (runs.updates[output.group].applied == 1).any()
      and _host_values.is_any_nonzero([runs.outs[i]])
    }
    self.scales_by_grad: dict[int, set[int]] = {i: set() for i in self._grads}
    self._scales_by_update: dict[int, set[int]] = {}
    self._zeros_after_overflow: set[int] = set()
    self._halved_outs: dict[int, dict[int, Any]] = {}
    for index in runs.traced.scale_indices:
      outs = (
        runs.overflow_outs
        if len(runs.traced.scale_indices) == 1
        else runs.run_with_overflow([index])
      )
      if outs is None:  # The step raises an error if a gradient overflows.
        for scales in self.scales_by_grad.values():
          scales.add(index)
        continue
      for i in self._list_overflowing(outs):
        self.scales_by_grad[i].add(index)
      self._zeros_after_overflow |= {
        i for i in self._grads if not _host_values.is_any_nonzero([outs[i]])
      }
      for k, update in self._traced.read_updates(outs).items():
        scale = update.update_scale
        if np.array_equal(scale, runs.updates[k].update_scale):
          continue
        self._scales_by_update.setdefault(k, set()).add(index)
        # An earlier update of this step may have decreased the scale.
        if not np.isinf(scale).any():
          for i, output in self._grads.items():
            if output.group == k:
              self.scales_by_grad[i].add(index)

  def find_mistakes(self) -> Iterator[_reports.Problem]:
    """Yield the mistakes of all updates."""
    yield from self._find_chained_wrappers()
    replaced_outs = self._replace_unscaled()
    reasons = {
      i: self._judge_grad(i, replaced_outs and replaced_outs[i])
      for i in self._grads
    }
    updates = {output.group for output in self._grads.values()}
    for mistake in (
      _CAST_TO_HALF,
      _NOT_SCALED,
      _NEVER_MULTIPLIED,
      _CONSTANT_SCALE,
      _OTHER_STATE,
      _TWO_STATES,
    ):
      for k in sorted(updates):
        indices = [i for i, x in self._grads.items() if x.group == k]
        names = [self._grads[i].name for i in indices if reasons[i] == mistake]
        if names:
          yield _reports.fill_in_names(
            mistake,
            names,
            [self._grads[i].name for i in indices],
            update=_scaling_mistakes.format_update(self._traced, k),
          )

  def _judge_grad(self, i: int, replaced: Any) -> _reports.Problem | None:
    """Return the mistake of a gradient, without names; None if it is sound.

    Args:
      i: the index of its output.
      replaced: its value if unscaled gradients are small.
    """
    output = self._grads[i]
    is_after_unscaling = replaced is not None and _host_values.is_any_different(
      [(replaced, self._runs.outs[i])]
    )
    if is_after_unscaling and not _host_values.is_any_nonzero([replaced]):
      return _CAST_TO_HALF
    if _is_fixed(self._traced, output.group):
      # The user may multiply the loss by a fixed scale as a constant.
      return None
    scales = self.scales_by_grad[i]
    own_scales = self._scales_by_update.get(output.group, set())
    if scales and own_scales:
      if not scales & own_scales:
        return _OTHER_STATE
      return _TWO_STATES if self._has_two_states(i, own_scales) else None
    if scales:
      return None
    if output.new_updates:
      # The difference of parameters, as an outer optimizer receives it.
      return None
    if i in self._zeros_after_overflow:
      return _NEVER_MULTIPLIED
    if is_after_unscaling:
      return _CONSTANT_SCALE if own_scales else None
    # A state that is no argument may scale it.
    is_unscaled = bool(self._traced.scale_indices) or not self._has_scale
    return _NOT_SCALED if output.has_half_backward and is_unscaled else None

  @property
  def _has_scale(self) -> bool:
    """Whether any loss is multiplied by a loss scale."""
    return any(tag.kind == "scale" for tag in self._traced.tags.values())

  def _has_two_states(self, i: int, own_scales: set[int]) -> bool:
    """Return whether the loss scale of another state acts on a gradient."""
    for index in {*self._traced.scale_indices} - own_scales:
      if index not in self._halved_outs:
        inputs = self._traced.scale_inputs(0.5, [index])
        outs = self._runs.run(inputs)
        self._halved_outs[index] = {k: outs[k] for k in self._grads}
      ratio = _scaling_mistakes.measure_ratio(
        self._runs.outs[i], self._halved_outs[index][i]
      )
      if any(_scaling_mistakes.is_close(ratio, x) for x in (0.5, 2.0)):
        return True
    return False

  def _find_chained_wrappers(self) -> Iterator[_reports.Problem]:
    """Yield updates whose gradients are the updates of another one."""
    by_group: dict[tuple[str, int], list[Any]] = {}
    for output, x in zip(self._traced.outputs, self._runs.outs, strict=True):
      by_group.setdefault((output.kind, output.group), []).append(x)
    updates = {k: x for (kind, k), x in by_group.items() if kind == "grads"}
    for first, second in itertools.permutations(updates, 2):
      new_updates = by_group.get(("new_updates", first), [])
      pairs = list(zip(new_updates, updates[second], strict=False))
      if (
        len(new_updates) == len(updates[second])
        and all(x.shape == y.shape for x, y in pairs)
        and _host_values.is_any_nonzero(new_updates)
        and not _host_values.is_any_different(pairs)
      ):
        yield _reports.fill_in_names(
          _CHAINED_WRAPPERS, first=first, second=second
        )

  def _replace_unscaled(self) -> Sequence[Any] | None:
    """Run the step with small unscaled gradients."""
    tags = self._traced.tags.values()
    groups = {tag for tag in tags if tag.kind == "unscaled"}
    if not groups:
      return None
    return self._runs.run_replaced(dict.fromkeys(groups, _SMALL))

  def _list_overflowing(self, outs: Sequence[Any]) -> Iterator[int]:
    """Yield the gradients that overflow in a run, even if it is hidden."""
    nonfinite = {*_host_values.list_nonfinite(outs)}
    outputs = self._traced.outputs
    received = {outputs[i].group for i in nonfinite & self._grads.keys()}
    is_hidden = any(outputs[i].kind == "unscaled" for i in nonfinite)
    for i, output in self._grads.items():
      if i in nonfinite or (is_hidden and output.group not in received):
        yield i


def _is_fixed(traced: _tracing.TracedFunction, group: int) -> bool:
  """Return whether the policy of an update never changes its loss scale."""
  return any(
    output.tag_kind == "fixed_update_scale" and output.group == group
    for output in traced.outputs
  )
