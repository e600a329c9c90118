"""``check_step``: is a float16 training step sound, and if not, what to do?"""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _host
from optax_lossscale.diagnostics import (
  _numbers,
  _precision,
  _progress,
  _step_checks,
  _tracing,
)
from optax_lossscale.diagnostics._comparison import _functions, _report
from optax_lossscale.diagnostics._overflow import _finding
from optax_lossscale.diagnostics._overflow import _report as _origins

# A report has at most 20 lines.
_MAX_PROBLEMS = 4
_MAX_NOT_CHECKED = 3


class Problem(NamedTuple):
  """A problem of a training step.

  Attributes:
    cause: the fault, with a figure.
    fix: the remedy; a line of code where there is one.
    keep_float32: the layers to pass to ``keep_float32=`` of
      :func:`optax_lossscale.autocast`, if that is the fix; else empty.
    loss_scale: the loss scale to set, if that is the fix; else None.

  Examples:
    >>> from optax_lossscale import diagnostics
    >>> problem = diagnostics.Problem(
    ...   "up overflows in the forward pass.",
    ...   "ols.autocast(loss_fn, keep_float32='up')",
    ...   keep_float32=("up",))
    >>> print(problem.loss_scale)
    None
  """

  cause: str
  fix: str
  keep_float32: tuple[str, ...] = ()
  loss_scale: float | None = None


@dataclasses.dataclass(frozen=True)
class StepCheck(_numbers.PrintedReport):
  """Result of :func:`check_step`. Prints as a list of at most 20 lines.

  Attributes:
    problems: a :class:`Problem` for each, the most important first.
    passed: what is sound, in sentences.
    not_checked: what was not checked, in sentences.
    precision: the :class:`PrecisionReport` of the step.
    overflow: the :class:`Overflow`; None if all gradients are finite.
    comparison: the :class:`PrecisionComparison`; None if ``autocast`` casts no
      matmul of the step.

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

  problems: tuple[Problem, ...]
  passed: tuple[str, ...]
  not_checked: tuple[str, ...]
  precision: _precision.PrecisionReport
  overflow: _origins.Overflow | None
  comparison: _report.PrecisionComparison | None

  @property
  def is_sound(self) -> bool:
    """Whether there is no problem in what was checked."""
    return not self.problems

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    reports = {
      "precision": self.precision,
      "overflow": self.overflow,
      "comparison": self.comparison,
    }
    return {
      "is_sound": self.is_sound,
      "problems": [problem._asdict() for problem in self.problems],
      "passed": list(self.passed),
      "not_checked": list(self.not_checked),
      **{k: x if x is None else x.as_dict() for k, x in reports.items()},
    }

  def __str__(self) -> str:
    count = len(self.problems)
    lines = [f"{count or 'No'} problem{'s' * (count != 1)}."]
    for i, problem in enumerate(self.problems[:_MAX_PROBLEMS], 1):
      lines += [f"{i}. {problem.cause}", f"   Fix: {problem.fix}"]
    if count > _MAX_PROBLEMS:
      lines.append(f"{count - _MAX_PROBLEMS} more: check.problems")
    lines += [f"ok  {sentence}" for sentence in self.passed]
    lines += [f"not checked: {x}" for x in self.not_checked[:_MAX_NOT_CHECKED]]
    if len(self.not_checked) > _MAX_NOT_CHECKED:
      lines.append("more was not checked: check.not_checked")
    lines.append("More: check.precision, check.overflow, check.comparison")
    return "\n".join(lines)


@_host.may_transfer
def check_step(
  fun: Callable[..., Any], *args: Any, progress: bool = True, **kwargs: Any
) -> StepCheck:
  """Checks whether a float16 training step is sound, and says what to fix.

  Combines :func:`precision_report`, :func:`find_overflow` and
  :func:`compare_precision` with ``search="bisect"``. Fix the first problem, and
  check the step again: an overflow hides all that follows it.

  Args:
    fun: the training step: a function that ``jax.jit`` could take and that
      calls the ``update`` of :func:`~optax_lossscale.with_loss_scaling`. It may
      return anything. Its arguments are not modified.
    *args: its arguments, with a batch as in training.
    progress: whether to show on the standard error stream how far it is, after
      a second. (If ``fun`` has an argument of this name, bind it with
      ``functools.partial``.)
    **kwargs: its keyword arguments.

  Returns:
    A :class:`StepCheck`. Problems raise nothing.

  Raises:
    TypeError: if ``fun`` is not callable, or an argument is a shape or traced.
    ValueError: if ``fun`` does not call ``update`` of ``with_loss_scaling``.

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
  name = "check_step"
  with (
    _progress.Progress(name, progress).running() as bar,
    _tracing.traced_on_host(name, fun, args, kwargs) as traced,
  ):
    if not traced.grads and not traced.unreached:
      raise ValueError(
        "check_step needs a training step that calls update of"
        f" with_loss_scaling, got {getattr(fun, '__name__', fun)}, which does"
        " not. For a gradient alone, use find_overflow and compare_precision."
      )
    precision = _precision.report_precision(traced, np.dtype(jnp.float16))
    search = _finding.search_overflow(traced, bar)
    comparison = None
    if traced.grads:
      comparison = _functions.compare(traced, "bisect", bar)
  return _as_check(traced, precision, search, comparison)


def _as_check(
  traced: _tracing.Traced,
  precision: _precision.PrecisionReport,
  search: _finding.Search,
  comparison: _functions.Comparison | None,
) -> StepCheck:
  mistakes = [*search.mistakes, *(comparison.mistakes if comparison else ())]
  # A branch may wait on purpose, unless it waits for finite gradients.
  is_problem = lambda x: x is not _step_checks.NOT_RUN or search.origin
  found_mistakes = filter(is_problem, dict.fromkeys(mistakes))
  problems = [Problem(*mistake) for mistake in found_mistakes]
  report = comparison and comparison.report
  found = _numeric_problems(search.origin, report, _scale_of(traced))
  passed = list(_passed_scaling(traced, bool(problems), search))
  if precision.fraction and precision.total_flops:
    passed.append(
      f"{precision.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {precision.dtype}"
    )
  if comparison and not found:
    passed += _passed_errors(comparison)
  limitations = list(_not_checked(traced, precision, search, comparison))
  return StepCheck(
    problems=(*problems, *found),
    passed=tuple(passed),
    not_checked=tuple(dict.fromkeys(limitations)),
    precision=precision,
    overflow=search.origin,
    comparison=report,
  )


def _scale_of(traced: _tracing.Traced) -> float | None:
  """Returns the loss scale of the step; None if there are several."""
  scales = [traced.inputs[i] for i in traced.scales]
  values = {x for scale in scales for x in np.ravel(scale).tolist()}
  return values.pop() if len(values) == 1 else None


def _numeric_problems(
  origin: _origins.Overflow | None,
  report: _report.PrecisionComparison | None,
  scale: float | None,
) -> list[Problem]:
  """Returns overflows; if there are none, errors."""
  problems: list[Problem] = []
  if report is not None and report.reference_is_finite:
    problems += _problems_in(report, scale)
  # An overflow that no matmul explains.
  return problems or [_problem_of(x) for x in (origin,) if x is not None]


def _problems_in(
  report: _report.PrecisionComparison, scale: float | None
) -> Iterator[Problem]:
  change = report.suggested_log2_scale_change
  if report.reference_is_zero:
    yield Problem(
      "All gradients are zero, in float32 too, so they cannot be compared.",
      "Check a batch that has gradients.",
    )
  elif report.overflowing:
    rows = {row.name: row for row in report.matmuls if not row.backward}
    for name in report.overflowing:
      amax = rows[name].amax
      # Of the dtype of this layer, since there may be two.
      top = amax * 2.0 ** rows[name].log2_headroom
      yield _kept(
        name,
        f"{name} overflows in the forward pass: max abs {amax:.2g},"
        f" {report.dtype} ends at {top:.5g}.",
      )
  elif change < 0:
    yield _rescaled(
      "The backward pass overflows, so this step is skipped", change, scale
    )
  elif change > 0:
    worst = report.inaccurate_arrays[0]
    yield _rescaled(
      f"{worst.name} underflows in the backward pass: relative error"
      f" {worst.error:.2g}",
      max(change - 1, 1),  # A factor of two stays free.
      scale,
    )
  else:
    for name in report.outliers:
      error = max(
        row.isolated_error for row in report.matmuls if row.name == name
      )
      yield _kept(
        name,
        f"{name} loses precision in {report.dtype}: relative error {error:.2g}"
        " from this layer alone.",
      )


def _kept(name: str, cause: str) -> Problem:
  fix = f"ols.autocast(loss_fn, keep_float32={name!r})"
  return Problem(cause, fix, keep_float32=(name,))


def _rescaled(cause: str, log2_change: int, scale: float | None) -> Problem:
  if scale is None:
    verb = "Raise" if log2_change > 0 else "Lower"
    fix = f"{verb} the loss scale by 2**{abs(log2_change)}."
    return Problem(f"{cause}.", fix)
  new_scale = scale * 2.0**log2_change
  fix = f"opt_state = ols.set_loss_scale(opt_state, {new_scale:g})"
  if log2_change < 0:
    fix += "; a dynamic loss scale also decreases on its own"
  cause = f"{cause} (loss scale {scale:g})."
  return Problem(cause, fix, loss_scale=new_scale)


def _problem_of(origin: _origins.Overflow) -> Problem:
  if origin.primitive == "argument":
    return Problem(
      f"The argument {origin.eqn_path} holds {origin.kind}.", origin.fix
    )
  direction = "backward" if origin.backward else "forward"
  where = origin.name or origin.source_line or origin.eqn_path
  operands = f" of {', '.join(map(str, origin.inputs[:2]))}" * bool(
    origin.inputs
  )
  cause = (
    f"{origin.primitive} in {where} returns {origin.kind} in the {direction}"
    f" pass{operands}."
  )
  return Problem(cause, origin.fix)


def _passed_scaling(
  traced: _tracing.Traced, has_mistakes: bool, search: _finding.Search
) -> Iterator[str]:
  if has_mistakes:
    return
  is_measured = [grad.halved_ratio is not None for grad in traced.grads]
  if is_measured and all(is_measured) and search.origin is None:
    yield "the loss is scaled once, by the state that update holds"
  if search.origin is None:
    yield "the gradients are finite"


def _passed_errors(comparison: _functions.Comparison) -> Iterator[str]:
  report = comparison.report
  noise = {*report.noise_only_arrays}
  errors = {k: x for k, x in report.array_errors.items() if k not in noise}
  errors = errors or report.array_errors
  worst = max(errors, key=lambda name: errors[name])
  yield (
    f"relative error of the gradients {report.error:.2g}; largest in"
    f" {worst or 'them'}, {errors[worst]:.2g}"
  )
  yield f"{comparison.underflow_fraction:.1%} of the gradient entries underflow"


def _not_checked(
  traced: _tracing.Traced,
  precision: _precision.PrecisionReport,
  search: _finding.Search,
  comparison: _functions.Comparison | None,
) -> Iterator[str]:
  if _step_checks.NOT_RUN in search.mistakes and search.origin is None:
    yield "the gradients: update is in a branch that was not taken"
  if any(grad.halved_ratio is None for grad in traced.grads):
    yield (
      "how the loss is scaled: some gradients do not depend on a loss scale"
      " (they are arguments of the step, or scaled by a constant)"
    )
  elif search.origin is not None:
    yield "whether gradients are unscaled once, since they are not finite"
  if precision.total_flops and not precision.fraction:
    yield (
      f"{precision.dtype}, in which no matmul of this step runs:"
      " ols.autocast(loss_fn) casts them"
    )
  elif comparison is None:
    yield "the precision of each layer: autocast casts no matmul of this step"
  yield from comparison.report.limitations if comparison else ()
  yield from precision.limitations
  yield from search.limitations
