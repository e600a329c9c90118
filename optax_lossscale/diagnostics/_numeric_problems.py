"""The problems of a training step, from the results of all reports.

Each function takes results, and returns problems with a cause and a fix, the
most important first.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from optax_lossscale.diagnostics import (
  _host_values,
  _reports,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._overflow import _report as _overflow_report
from optax_lossscale.diagnostics._precision import _comparison

# Powers of two by which the loss scale falls, to find gradients.
_LOG2_DECREASES = (4, 8, 12, 16)


def read_loss_scale(
  runs: _step_runs.StepRuns, can_decrease: bool
) -> _comparison.LossScale:
  """Return the loss scale that a step has as an argument, if it acts."""
  traced, values = runs.traced, set[float]()
  if runs.loss_scale_acts:
    scales = _host_values.to_host(
      [traced.inputs[i] for i in traced.scale_indices]
    )
    values = {x for scale in scales for x in np.ravel(scale).tolist()}
  value = values.pop() if len(values) == 1 else None
  return _comparison.LossScale(value, traced.lowest_scale, can_decrease)


def check_empty_arguments(
  traced: _tracing.TracedFunction, origin: _overflow_report.Overflow | None
) -> list[_reports.Problem]:
  """Check that no mean is over an empty argument, and so 0 / 0."""
  if origin is None or origin.primitive != "div" or origin.kind != "nan":
    return []
  return [
    _reports.Problem(
      f"The argument {name} is empty (its shape is {x.shape}), and"
      f" {_describe_origin(origin)}.",
      "Pass a batch with examples, and leave out an empty one.",
    )
    for name, x in zip(traced.input_names, traced.inputs, strict=True)
    if 0 in x.shape
  ][:1]


def find_numeric_problems(
  origin: _overflow_report.Overflow | None,
  report: _comparison.PrecisionComparison | None,
  loss_scale: _comparison.LossScale,
) -> list[_reports.Problem]:
  """Return the problems with overflow, or else with lost precision."""
  problems: list[_reports.Problem] = []
  if report is not None:
    is_scale_cause = origin is None or (
      origin.scale_factor != 0 and not _overflow_report.has_zero_grads(origin)
    )
    if not is_scale_cause:
      report = dataclasses.replace(report, suggested_log2_scale_change=0)
    problems += _comparison.find_problems(report, loss_scale)
  # The comparison only knows matmuls. Report the overflow of another operation
  # first if it is in the forward pass, and else if nothing explains it.
  if origin is None:
    return problems
  if problems and (origin.backward or origin.in_autocast):
    return problems
  # What the user wrote in half precision overflows because of the origin.
  others = [x for x in problems if x.keep_float32 or x.loss_scale]
  return [_as_problem(origin), *others]


def _as_problem(origin: _overflow_report.Overflow) -> _reports.Problem:
  if origin.primitive == "argument":
    return _reports.Problem(
      f"The argument {origin.eqn_path} holds {origin.kind}.", origin.fix
    )
  operands_text = f" of {', '.join(map(str, origin.inputs[:2]))}" * bool(
    origin.inputs
  )
  cause = f"{_describe_origin(origin)}{operands_text}."
  return _reports.Problem(cause, origin.fix)


def _describe_origin(origin: _overflow_report.Overflow) -> str:
  """Return which operation returned an inf or a NaN, and where."""
  location = origin.name or origin.source_line or origin.eqn_path
  return (
    f"{origin.primitive} in {location} returns {origin.kind}"
    f" {origin.format_stage()}"
  )


def find_zero_grad_problems(
  runs: _step_runs.StepRuns,
  report: _comparison.PrecisionComparison | None,
) -> Iterator[_reports.Problem]:
  """Yield a problem for each `update` whose gradients are all zero.

  Args:
    runs: the runs of the step.
    report: the comparison with float32, or None.
  """
  indices = list(_list_zero_grads(runs.base))
  log2_decrease = _find_scale_with_grads(runs, indices) if indices else None
  for k in indices:
    subject = "All gradients"
    if len({x.group for x in runs.traced.grad_outputs}) > 1:
      subject += f" of update [{k}]"
    if log2_decrease is not None:
      yield _reports.Problem(
        f"{subject} are zero at this loss scale, but not if it is lower by a"
        f" factor of 2**{log2_decrease}: something cuts off the scaled loss,"
        " such as a clip at the largest number of float16.",
        "Don't clip the scaled loss, since update skips a step that overflows:"
        " ols.value_and_grad(loss_fn, opt_state).",
      )
      continue
    is_zero_in_float32 = report is not None and report.reference_is_zero
    in_float32 = ", in float32 too" if is_zero_in_float32 else ""
    yield _reports.Problem(
      f"{subject} are zero{in_float32}.",
      "This is fine if it is meant, such as a loss that begins later, or an"
      " accumulator in front of update. Otherwise check a batch that has"
      " gradients. If no batch has any, look for a masked loss, a dead layer,"
      " a factor of zero, an operation without a derivative (stop_gradient,"
      " argmax, rounding, a comparison), or a constant that is inf in float16,"
      " such as a count in a divisor.",
    )


def _find_scale_with_grads(
  runs: _step_runs.StepRuns, indices: Sequence[int]
) -> int | None:
  """Return a power of two by which the scale falls until there are gradients.

  Args:
    runs: the runs of the step.
    indices: the updates whose gradients are zero.
  """
  for log2_decrease in _LOG2_DECREASES if runs.traced.scale_indices else ():
    run = runs.run_with_factor(2.0**-log2_decrease)
    if not {*_list_zero_grads(run)}.issuperset(indices):
      return log2_decrease
  return None


def _list_zero_grads(run: _step_runs.Run) -> Iterator[int]:
  """Yield the calls of `update`, or the backward passes, with only zeros."""
  traced, updates = run.traced, run.updates
  for i in dict.fromkeys(x.group for x in traced.grad_outputs):
    has_run = updates[i].has_run if i in updates else not traced.has_update
    if has_run and not _host_values.is_any_nonzero(run.select("grads", i)):
      yield i
