"""``check_step``: all checks of a float16 training step in one report.

The step is traced once. ``precision_report``, ``find_overflow`` and
``compare_precision`` then run on the same jaxpr, and their results become a
list of problems, each with a fix, the most important first.
"""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _transfer_guard
from optax_lossscale.diagnostics import (
  _precision_report,
  _report_format,
  _scaling_mistakes,
  _tracing,
)
from optax_lossscale.diagnostics._comparison import _compare_precision
from optax_lossscale.diagnostics._comparison import (
  _report as _comparison_report,
)
from optax_lossscale.diagnostics._overflow import _find_overflow
from optax_lossscale.diagnostics._overflow import _report as _overflow_report

# The printed report has at most 20 lines: longer lists are cut.
_MAX_PROBLEMS = 4
_MAX_NOT_CHECKED = 3


class Problem(NamedTuple):
  """A problem of a training step.

  Attributes:
    cause: the fault, with a number.
    fix: the fix; a line of code if possible.
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
class StepCheck(_report_format.PrintedReport):
  """Result of :func:`check_step`. Prints as a list of at most 20 lines.

  Attributes:
    problems: a :class:`Problem` for each, the most important first.
    passed: the checks that passed, in sentences.
    not_checked: the checks that were not possible, in sentences.
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
  precision: _precision_report.PrecisionReport
  overflow: _overflow_report.Overflow | None
  comparison: _comparison_report.PrecisionComparison | None

  @property
  def is_sound(self) -> bool:
    """Whether the checks found no problem."""
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
    lines.append("More: check.precision, check.overflow, check.comparison")
    return "\n".join(lines)


@_transfer_guard.allow_transfers
def check_step(
  fun: Callable[..., Any], *args: Any, progress: bool = True, **kwargs: Any
) -> StepCheck:
  """Checks whether a float16 training step is sound, and suggests fixes.

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
  with _tracing.trace_on_host(
    "check_step", fun, args, kwargs, progress=progress
  ) as (traced, progress_line):
    if not traced.grad_outputs and not traced.unreached_locations:
      raise ValueError(
        "check_step needs a training step that calls update of"
        f" with_loss_scaling, got {getattr(fun, '__name__', fun)}, which does"
        " not. For a gradient alone, use find_overflow and compare_precision."
      )
    precision = _precision_report.report_traced(traced, np.dtype(jnp.float16))
    search_result = _find_overflow.search_traced(traced, progress_line)
    comparison = None
    if traced.grad_outputs:
      comparison = _compare_precision.compare_traced(
        traced, "bisect", progress_line
      )
  return _build_step_check(traced, precision, search_result, comparison)


def _build_step_check(
  traced: _tracing.TracedFunction,
  precision: _precision_report.PrecisionReport,
  search_result: _find_overflow.SearchResult,
  comparison: _compare_precision.ComparisonResult | None,
) -> StepCheck:
  mistakes = [
    *search_result.mistakes,
    *(comparison.mistakes if comparison else ()),
  ]
  # A step may skip update on purpose, for example to accumulate gradients. It
  # is a problem only together with an overflow: the branch may test for it.
  is_problem = lambda x: (
    x is not _scaling_mistakes.UPDATE_NOT_RUN or search_result.origin
  )
  unique_mistakes = filter(is_problem, dict.fromkeys(mistakes))
  problems = [Problem(*mistake) for mistake in unique_mistakes]
  report = comparison and comparison.report
  numeric_problems = _find_numeric_problems(
    search_result.origin, report, _get_loss_scale(traced)
  )
  passed = list(_describe_sound_scaling(traced, bool(problems), search_result))
  if precision.fraction and precision.total_flops:
    passed.append(
      f"{precision.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {precision.dtype}"
    )
  if comparison and not numeric_problems:
    passed += _describe_errors(comparison)
  limitations = list(
    _describe_unchecked(traced, precision, search_result, comparison)
  )
  return StepCheck(
    problems=(*problems, *numeric_problems),
    passed=tuple(passed),
    not_checked=tuple(dict.fromkeys(limitations)),
    precision=precision,
    overflow=search_result.origin,
    comparison=report,
  )


def _get_loss_scale(traced: _tracing.TracedFunction) -> float | None:
  """Return the loss scale of the step; None if there are several."""
  scales = [traced.inputs[i] for i in traced.scale_indices]
  values = {x for scale in scales for x in np.ravel(scale).tolist()}
  return values.pop() if len(values) == 1 else None


def _find_numeric_problems(
  origin: _overflow_report.Overflow | None,
  report: _comparison_report.PrecisionComparison | None,
  scale: float | None,
) -> list[Problem]:
  """Return the problems with overflow, or else with lost precision."""
  problems: list[Problem] = []
  if report is not None and report.reference_is_finite:
    problems += _find_precision_problems(report, scale)
  # The comparison only knows matmuls. If it explains nothing, report the
  # overflow of another operation.
  return problems or [_as_problem(x) for x in (origin,) if x is not None]


def _find_precision_problems(
  report: _comparison_report.PrecisionComparison, scale: float | None
) -> Iterator[Problem]:
  log2_change = report.suggested_log2_scale_change
  if report.reference_is_zero:
    yield Problem(
      "All gradients are zero, in float32 too, so they cannot be compared.",
      "Check a batch that has gradients.",
    )
  elif report.overflowing:
    forward_rows = {row.name: row for row in report.matmuls if not row.backward}
    for name in report.overflowing:
      amax = forward_rows[name].amax
      # Not from the dtype of the report, which may be two dtypes.
      dtype_max = amax * 2.0 ** forward_rows[name].log2_headroom
      yield _suggest_float32(
        name,
        f"{name} overflows in the forward pass: max abs {amax:.2g},"
        f" {report.dtype} ends at {dtype_max:.5g}.",
      )
  elif log2_change < 0:
    yield _suggest_rescale(
      "The backward pass overflows, so this step is skipped", log2_change, scale
    )
  elif log2_change > 0:
    worst_array = report.inaccurate_arrays[0]
    yield _suggest_rescale(
      f"{worst_array.name} underflows in the backward pass: relative error"
      f" {worst_array.error:.2g}",
      max(log2_change - 1, 1),  # Leave a factor of two of headroom.
      scale,
    )
  else:
    for name in report.outliers:
      error = max(
        row.isolated_error for row in report.matmuls if row.name == name
      )
      yield _suggest_float32(
        name,
        f"{name} loses precision in {report.dtype}: relative error {error:.2g}"
        " from this layer alone.",
      )


def _suggest_float32(name: str, cause: str) -> Problem:
  fix = f"ols.autocast(loss_fn, keep_float32={name!r})"
  return Problem(cause, fix, keep_float32=(name,))


def _suggest_rescale(
  cause: str, log2_change: int, scale: float | None
) -> Problem:
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


def _as_problem(origin: _overflow_report.Overflow) -> Problem:
  if origin.primitive == "argument":
    return Problem(
      f"The argument {origin.eqn_path} holds {origin.kind}.", origin.fix
    )
  direction = "backward" if origin.backward else "forward"
  location = origin.name or origin.source_line or origin.eqn_path
  operands_text = f" of {', '.join(map(str, origin.inputs[:2]))}" * bool(
    origin.inputs
  )
  cause = (
    f"{origin.primitive} in {location} returns {origin.kind} in the {direction}"
    f" pass{operands_text}."
  )
  return Problem(cause, origin.fix)


def _describe_sound_scaling(
  traced: _tracing.TracedFunction,
  has_mistakes: bool,
  search_result: _find_overflow.SearchResult,
) -> Iterator[str]:
  if has_mistakes:
    return
  measured_mask = [
    grad.expected_ratio is not None for grad in traced.grad_outputs
  ]
  if measured_mask and all(measured_mask) and search_result.origin is None:
    yield "the loss is scaled once, by the state that update holds"
  if search_result.origin is None:
    yield "the gradients are finite"


def _describe_errors(
  comparison: _compare_precision.ComparisonResult,
) -> Iterator[str]:
  report = comparison.report
  noise_names = {*report.noise_only_arrays}
  errors = {
    k: x for k, x in report.array_errors.items() if k not in noise_names
  }
  errors = errors or report.array_errors
  worst_name = max(errors, key=lambda name: errors[name])
  yield (
    f"relative error of the gradients {report.error:.2g}; largest in"
    f" {worst_name or 'them'}, {errors[worst_name]:.2g}"
  )
  yield f"{comparison.underflow_fraction:.1%} of the gradient entries underflow"


def _describe_unchecked(
  traced: _tracing.TracedFunction,
  precision: _precision_report.PrecisionReport,
  search_result: _find_overflow.SearchResult,
  comparison: _compare_precision.ComparisonResult | None,
) -> Iterator[str]:
  if (
    _scaling_mistakes.UPDATE_NOT_RUN in search_result.mistakes
    and search_result.origin is None
  ):
    yield "the gradients: update is in a branch that was not taken"
  if any(grad.expected_ratio is None for grad in traced.grad_outputs):
    yield (
      "how the loss is scaled: some gradients do not depend on a loss scale"
      " (they are arguments of the step, or scaled by a constant)"
    )
  elif search_result.origin is not None:
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
  yield from search_result.limitations
