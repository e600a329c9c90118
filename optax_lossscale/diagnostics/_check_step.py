"""``check_step``: all checks of a training step in one report.

The step is traced once. ``count_flops``, ``find_overflow`` and
``compare_precision`` then run on the same jaxpr, and their results become a
list of problems, each with a fix, the most important first.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from optax_lossscale import _arrays
from optax_lossscale.diagnostics import (
  _carried_arrays,
  _problems,
  _reports,
  _tracing,
  _wiring,
)
from optax_lossscale.diagnostics._overflow import _find_overflow
from optax_lossscale.diagnostics._overflow import _report as _overflow_report
from optax_lossscale.diagnostics._precision import (
  _compare_runs,
  _comparison,
  _count_flops,
)

# The printed report has at most 20 lines: longer lists are cut.
_MAX_PROBLEMS = 4
_MAX_NOT_CHECKED = 3


@dataclasses.dataclass(frozen=True)
class StepCheck(_reports.PrintedReport):
  """Result of :func:`check_step`. Prints as a list of at most 20 lines.

  Attributes:
    problems: a :class:`Problem` for each, the most important first.
    passed: the checks that passed, in sentences.
    not_checked: the checks that were not possible, in sentences.
    flops: the :class:`FlopCount` of the step.
    overflow: the :class:`Overflow`; None if all gradients are finite.
    comparison: the :class:`PrecisionComparison`; None if the step rounds
      nothing to half precision that leads to a gradient or a result.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> def train_step(w, opt_state, x):
    ...   loss_fn = ols.autocast(lambda w: jnp.mean((x @ w) ** 2))
    ...   return tx.update(ols.grad(loss_fn, opt_state)(w), opt_state, w)
    >>> w, x = jnp.eye(4), jnp.ones((2, 4))
    >>> check = diagnostics.check_step(
    ...   train_step, w, tx.init(w), x, progress=False)
    >>> check.is_sound, check.passed[0]
    (True, 'the loss is scaled once, by the state that update holds')
  """

  problems: tuple[_reports.Problem, ...]
  passed: tuple[str, ...]
  not_checked: tuple[str, ...]
  flops: _count_flops.FlopCount
  overflow: _overflow_report.Overflow | None
  comparison: _comparison.PrecisionComparison | None

  @property
  def is_sound(self) -> bool:
    """Whether the checks found no problem."""
    return not self.problems

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    return {"is_sound": self.is_sound, **super().as_dict()}

  def __str__(self) -> str:
    num_problems = len(self.problems)
    lines = [f"{num_problems or 'No'} problem{'s' * (num_problems != 1)}."]
    for i, problem in enumerate(self.problems[:_MAX_PROBLEMS], 1):
      lines += [f"{i}. {problem.cause}", f"   Fix: {problem.fix}"]
    if num_problems > _MAX_PROBLEMS:
      lines.append(f"{num_problems - _MAX_PROBLEMS} more: check.problems")
    lines += [f"ok  {sentence}" for sentence in self.passed]
    lines += [f"not checked: {x}" for x in self.not_checked[:_MAX_NOT_CHECKED]]
    if len(self.not_checked) > _MAX_NOT_CHECKED:
      lines.append("more was not checked: check.not_checked")
    lines.append("More: check.flops, check.overflow, check.comparison")
    return "\n".join(lines)


@_arrays.allow_transfers
def check_step(
  fun: Callable[..., Any], *args: Any, progress: bool = True, **kwargs: Any
) -> StepCheck:
  """Checks whether a training step is sound, and suggests fixes.

  Combines :func:`count_flops`, :func:`find_overflow` and
  :func:`compare_precision`, of which it measures layers only if an error is
  large. Fix the first problem, and check the step again: an overflow hides all
  that follows it. If several processes train together, call it in each of them:
  all get the same report.

  The step may use :func:`~optax_lossscale.with_loss_scaling`, a bare optimizer
  of Optax, a framework, or no library. If the wrapper receives no gradients,
  how the loss is scaled is not checked, nor whether the updates are returned.

  Each array in half precision that the step replaces, such as a parameter, a
  moment, an average or a counter, must make at least 25% of its change in
  float32. The step may store the rest elsewhere, as master weights or as the
  compensation of a Kahan sum. Arrays that are rounded at random are not judged.

  Args:
    fun: the training step: a function that ``jax.jit`` could take. It may
      return anything, and a function that trains nothing is checked as far as
      possible. Its arguments are not modified. Its prints and logs appear once;
      each run calls the callbacks that return something.
    *args: its arguments, with a batch as in training.
    progress: whether to show on the standard error stream how far it is, after
      a second. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`StepCheck`. Problems raise nothing.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or traced.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def loss_fn(params, x):
    ...   scores = x @ params["first"] @ params["second"]
    ...   return jnp.mean((1e-4 * scores) ** 2)
    >>> tx = ols.with_loss_scaling(optax.sgd(0.1))
    >>> def train_step(params, opt_state, x):
    ...   grads = ols.grad(ols.autocast(loss_fn), opt_state)(params, x)
    ...   return tx.update(grads, opt_state, params)
    >>> params = {"first": 1e4 * jnp.eye(8), "second": jnp.eye(8)}
    >>> check = diagnostics.check_step(
    ...   train_step, params, tx.init(params), jnp.full((4, 8), 9.0),
    ...   progress=False)
    >>> print(check.is_sound)
    False
    >>> sorted(problem.keep_float32[0] for problem in check.problems)
    ['first', 'second']
  """
  with _tracing.trace_on_host(
    "check_step", fun, args, kwargs, progress=progress
  ) as (traced, progress_line):
    results = _run_reports(traced, progress_line)
    problems, passed, not_checked = _problems.judge(results)
  return StepCheck(
    problems=tuple(problems),
    passed=tuple(passed),
    not_checked=tuple(not_checked),
    flops=results.flops,
    overflow=results.search.origin,
    comparison=results.report,
  )


def _run_reports(
  traced: _tracing.TracedFunction,
  progress: _tracing.ProgressLine,
) -> _problems.Results:
  """Run all reports on a step."""
  # The step is run, so it need not be said that a branch may not be taken.
  flops = _count_flops.count_traced(traced._replace(cond_branch_locations=[]))
  search = _find_overflow.search_traced(traced, progress, ignores_metrics=True)
  # An overflow of the forward pass is seen only where the backward pass is
  # finite.
  is_hidden = search.origin is not None and _overflow_report.has_zero_grads(
    search.origin
  )
  runs = search.finite_runs if is_hidden else search.runs
  carried = _carried_arrays.find_carried(runs.base)
  # After an overflow, the step in float32 may be another one.
  half_carried = (
    _carried_arrays.select_half(runs.base, carried)
    if search.origin is None
    else []
  )
  comparison = _compare_runs.compare_runs(
    runs,
    progress,
    measures_all=False,
    further_outputs=[x.output_index for x in half_carried],
  )
  changes = (
    _carried_arrays.check_changes(runs.base, half_carried, comparison.outs)
    if comparison
    else _carried_arrays.Changes()
  )
  wiring = _wiring.check_wiring(search, comparison, carried)
  report = comparison.report if comparison else None
  return _problems.Results(flops, search, report, wiring, changes)
