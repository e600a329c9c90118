"""The problems of a training step, from the results of all reports.

Only this module decides which problem hides another one. ``judge`` returns the
problems with a cause and a fix, the most important first; the checks that
passed; and those that were not possible.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from optax_lossscale.diagnostics import (
  _carried_arrays,
  _host_values,
  _reports,
  _scaling_mistakes,
  _step_runs,
  _tracing,
  _wiring,
)
from optax_lossscale.diagnostics._overflow import _find_overflow
from optax_lossscale.diagnostics._overflow import _report as _overflow_report
from optax_lossscale.diagnostics._precision import _comparison, _count_flops

_CUT_OFF = _reports.Problem(
  "All gradients{of_update} are zero at this loss scale, but not if it is lower"
  " by a factor of 2**{log2_decrease}: something cuts off the scaled loss, such"
  " as a clip at the largest number of float16.",
  "Don't clip the scaled loss, since update skips a step that overflows:"
  " ols.value_and_grad(loss_fn, opt_state).",
)
_ZERO_GRADS = _reports.Problem(
  "All gradients{of_update} are zero{in_float32}.",
  "This is fine if it is meant, such as a loss that begins later, or an"
  " accumulator in front of update. Otherwise check a batch that has gradients."
  " If no batch has any, look for a masked loss, a dead layer, a factor of"
  " zero, an operation without a derivative (stop_gradient, argmax, rounding, a"
  " comparison), or a constant that is inf in float16, such as a count in a"
  " divisor.",
)
# Powers of two by which the loss scale falls, to find gradients.
_LOG2_DECREASES = (4, 8, 12, 16)


class Results(NamedTuple):
  """The results of all reports on a step."""

  flops: _count_flops.FlopCount
  search: _find_overflow.SearchResult
  report: _comparison.PrecisionComparison | None
  wiring: _wiring.Wiring
  changes: _carried_arrays.Changes


def judge(
  results: Results,
) -> tuple[list[_reports.Problem], list[str], list[str]]:
  """Return what the results of all reports say about a step.

  Returns:
    The problems, the most important first; the checks that passed; and those
    that were not possible, in sentences.
  """
  numeric_problems = _find_numeric_problems(results)
  return (
    [
      *results.wiring.problems,
      *numeric_problems,
      *results.changes.problems,
    ],
    list(_describe_passed(results, has_problems=bool(numeric_problems))),
    list(dict.fromkeys(_describe_unchecked(results))),
  )


def _describe_passed(results: Results, has_problems: bool) -> Iterator[str]:
  """Yield the checks that passed.

  Args:
    results: the results of all reports.
    has_problems: whether there are problems with the numbers of the step.
  """
  flops, search, report, wiring, changes = results
  is_sound = wiring.has_run and not has_problems
  if is_sound and not wiring.problems:
    if wiring.knows_scales:
      yield "the loss is scaled once, by the state that update holds"
    has_grads = bool(search.runs.traced.grad_outputs)
    yield f"the {'gradients' if has_grads else 'results'} are finite"
  yield from wiring.passed
  if flops.fraction and flops.total_flops:
    yield (
      f"{flops.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {flops.dtype}"
    )
  if report and is_sound:
    yield from _describe_errors(report)
  yield from changes.passed


def _find_numeric_problems(results: Results) -> list[_reports.Problem]:
  """Return the problems with overflow, lost precision and zero gradients."""
  _, search, report, wiring, _ = results
  report = report if wiring.has_run else None
  loss_scale = _read_loss_scale(search.runs, can_decrease=not wiring.problems)
  problems = _check_empty_arguments(
    search.runs.traced, search.origin
  ) or _combine_problems(search.origin, report, loss_scale)
  if search.origin is not None or problems or not wiring.has_run:
    return problems
  return list(_find_zero_grad_problems(search.runs, report))


def _read_loss_scale(
  runs: _step_runs.StepRuns, can_decrease: bool
) -> _comparison.LossScale:
  """Return the loss scale that a step has as an argument, if it acts."""
  traced = runs.traced
  indices = traced.scale_indices if runs.loss_scale_acts else ()
  scales = _host_values.to_host([traced.inputs[i] for i in indices])
  values = {x for scale in scales for x in np.ravel(scale).tolist()}
  value = values.pop() if len(values) == 1 else None
  return _comparison.LossScale(value, traced.lowest_scale, can_decrease)


def _check_empty_arguments(
  traced: _tracing.TracedFunction, origin: _overflow_report.Overflow | None
) -> list[_reports.Problem]:
  """Check that no mean is over an empty argument, and so 0 / 0."""
  if origin is None or origin.primitive != "div" or origin.kind != "nan":
    return []
  return [
    _reports.Problem(
      f"The argument {name} is empty (its shape is {x.shape}), so"
      f" {origin.format_conclusion()}",
      "Pass a batch with examples, and leave out an empty one.",
    )
    for name, x in zip(traced.input_names, traced.inputs, strict=True)
    if 0 in x.shape
  ][:1]


def _combine_problems(
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
  if origin is None or (problems and (origin.backward or origin.in_autocast)):
    return problems
  # Layers that are cast by hand overflow as a consequence of the origin.
  others = [x for x in problems if x.keep_float32 or x.loss_scale]
  cause = origin.format_conclusion()
  if origin.inputs:
    cause += f" Operands: {', '.join(map(str, origin.inputs[:2]))}."
  if origin.inputs and not origin.name:
    cause += f" Equation: {origin.eqn_path}."
  return [_reports.Problem(cause, origin.fix), *others]


def _find_zero_grad_problems(
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
  is_zero_in_float32 = report is not None and report.reference_is_zero
  for k in indices:
    name = _scaling_mistakes.name_update(runs.traced, k)
    yield _reports.fill_in_names(
      _ZERO_GRADS if log2_decrease is None else _CUT_OFF,
      of_update=name and f" of update{name}",
      log2_decrease=log2_decrease,
      in_float32=", in float32 too" * is_zero_in_float32,
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


def _describe_errors(
  report: _comparison.PrecisionComparison,
) -> Iterator[str]:
  excused = report.ill_conditioned_arrays
  errors = {k: x for k, x in report.array_errors.items() if k not in excused}
  if errors:
    worst_name = max(errors, key=lambda name: errors[name])
    yield (
      f"relative error of the {report.target} in {report.dtype}"
      f" {report.error:.2g}"
      + f"; largest in {worst_name}, {errors[worst_name]:.2g}"
      * bool(worst_name)
      + f" (without {len(excused)} ill-conditioned ones)" * bool(excused)
    )
  noun = report.target.removesuffix("s")
  yield f"{report.underflow_fraction:.1%} of the {noun} entries underflow"


def _describe_unchecked(results: Results) -> Iterator[str]:
  flops, search, report, wiring, _ = results
  if not wiring.has_run and search.origin is None:
    yield "the gradients: they are in a branch that was not taken"
  yield from wiring.limitations
  if report is None:
    offer = ": ols.autocast(loss_fn) casts its matmuls" * flops.can_autocast
    yield f"half precision, to which this step rounds nothing{offer}"
  else:
    yield from _describe_amplification(report)
    yield from report.limitations
  yield from flops.limitations
  yield from search.limitations


def _describe_amplification(
  report: _comparison.PrecisionComparison,
) -> Iterator[str]:
  """Yield that errors are large because the step amplifies any rounding."""
  names = report.ill_conditioned_arrays
  error = max((report.array_errors[name] for name in names), default=0.0)
  # A few gradients are rounding noise in many sound steps.
  if 2 * len(names) > len(report.array_errors) and math.isfinite(error):
    yield (
      f"the precision of {len(names)} gradients, such as {names[0]}: the step"
      f" amplifies any rounding, so errors of {error:.2g} are expected in"
      f" {report.dtype}; or a callback returns something else in each run"
    )
