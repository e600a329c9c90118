"""The report of ``compare_precision``."""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from optax_lossscale.diagnostics import _reports

_MAX_ARRAYS = _MAX_PROBLEMS = 3
# If no layer alone explains an error, so many are listed.
_MAX_LAYERS = 3


@dataclasses.dataclass(frozen=True)
class PrecisionComparison(_reports.PrintedReport):
  """The report of :func:`compare_precision`: which layers lose precision.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    target: the arrays that are compared: ``"gradients"`` that the optimizer of
      a training step receives, or ``"results"`` of another function.
    reference_is_zero: whether all compared arrays are zero in float32, so that
      there is nothing to compare.
    error: the norm of the difference over the norm in float32, of all compared
      arrays together, without ``ill_conditioned_arrays``; inf if they are not
      finite. If there are several results, or several
      ``update``, it is the largest error of one of them.
    reference_is_finite: whether all compared arrays are finite in float32. If
      not, the report names no layer: find_overflow names the operation.
    outliers: the names of the layers that cause a far larger error than all
      other layers together, the worst first; often empty. It is at least 16
      times the spacing of numbers at 1 (in float16, 0.016; in bfloat16, 0.12),
      or 64 times for a single array.
    array_errors: the relative error of each array that is compared, by its
      path, such as ``blocks/0/up``, which is also what ``keep_float32=`` takes.
      The gradients of several ``update`` begin with ``[0]/``, ``[1]/`` and so
      on. If a key holds a ``/``, so that two paths of a tree would be spelled
      alike, each such key of this tree is quoted, as in ``'a/b'/w``.
    layers: a :class:`LayerPrecision` for each layer and pass that rounds to
      half precision, the one with the largest isolated error first.
      :func:`check_step` measures layers only if an error is large and no other
      loss scale helps, and after an overflow only those that overflow.
    limitations: the parts of the program that were not analyzed, in sentences.
    ill_conditioned_arrays: the names of arrays with an error that is expected
      of any rounding to this dtype, since the function amplifies roundings, and
      that no layer causes alone. The gradient of a bias in front of a
      normalization is only rounding noise, in float32 too.
    inaccurate_arrays: the names of all other arrays whose error is above 64
      times the spacing of numbers at 1 (in float16, 0.06; in bfloat16, 0.5),
      the largest error first.
    underflow_fraction: the fraction of all compared entries that are zero in
      half precision, but not in float32.
    is_accurate: whether the errors are as small as they should be in this
      dtype: those of single arrays, and the error of all together, which may be
      32 times the spacing of numbers at 1 (in float16, 0.03; in bfloat16,
      0.25).
    overflowing: the names of the layers that overflow in the forward pass and
      make the error large, the one with the largest numbers first. A layer that
      overflows only in the backward pass is not included, since a lower loss
      scale helps. A derivative inside the loss, such as a force, is part of the
      forward pass.
    suggested_log2_scale_change: log2 of the factor by which to change the loss
      scale; 0 if the loss scale is not the cause. If the loss scale is an
      argument, it was tried: below zero, the gradients are finite with it;
      above zero, their errors are smaller.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> loss_fn = ols.autocast(lambda params, x: jnp.sum(x @ params["w"]))
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, {"w": jnp.eye(4)}, jnp.full((2, 4), 7e4), progress=False)
    >>> report.overflowing, report.outliers
    (('w',), ('w',))
  """

  dtype: str
  target: str
  reference_is_zero: bool
  error: float
  reference_is_finite: bool
  outliers: tuple[str, ...]
  array_errors: dict[str, float]
  layers: tuple[_reports.LayerPrecision, ...]
  limitations: tuple[str, ...]
  ill_conditioned_arrays: tuple[str, ...] = ()
  inaccurate_arrays: tuple[str, ...] = ()
  underflow_fraction: float = 0.0
  is_accurate: bool = True
  overflowing: tuple[str, ...] = ()
  suggested_log2_scale_change: int = 0

  def get_row(self, name: str) -> _reports.LayerPrecision:
    """Returns the first row of a layer: the one with the largest error."""
    return next(row for row in self.layers if row.name == name)

  def __str__(self) -> str:
    lines = [*self._format_conclusion(), self._format_errors()]
    lines += self.limitations
    # After an overflow, most errors are infinite and do not identify a layer.
    has_overflow = self.overflowing or self.suggested_log2_scale_change < 0
    if self.reference_is_finite and not has_overflow:
      lines += self._format_arrays()
    lines += _reports.format_table(
      list(map(_as_cells, self.layers)), 2, full_list="report.layers"
    )
    return "\n".join(lines)

  def _format_conclusion(self) -> list[str]:
    """Return the problems and their fixes, or that there is none."""
    if self.reference_is_zero:
      return [
        f"All {self.target} are zero in float32, so there is nothing to"
        " compare. Pass a batch that has gradients, and a step that applies"
        " them."
      ]
    if not self.reference_is_finite:
      return [
        f"The {self.target} are not finite in float32 either: find_overflow"
        " names the operation."
      ]
    problems = find_problems(self)
    is_small = self.is_accurate and not self.ill_conditioned_arrays
    suffix = ", which is small" * is_small
    lines = [f"No single layer dominates the error{suffix}."] * (not problems)
    for problem in problems[:_MAX_PROBLEMS]:
      lines += [problem.cause, f"Fix: {problem.fix}"]
    more = "more: report.overflowing, report.outliers"
    return [*lines, *_reports.format_rest(problems, _MAX_PROBLEMS, more)]

  def _format_errors(self) -> str:
    """Return the line with the error of all arrays together."""
    num_arrays = len(self.array_errors)
    arrays = self.target.removesuffix("s" * (num_arrays == 1))
    receiver = " that the optimizer receives" * (self.target == "gradients")
    return (
      f"Relative error in {self.dtype}: {self.error:.2g} ({num_arrays}"
      f" {arrays}{receiver})."
    )

  def _format_arrays(self) -> list[str]:
    """Return the lines on the largest errors, and on expected ones."""
    names, more = self.inaccurate_arrays, "more: report.inaccurate_arrays"
    lines = ["Largest relative errors:"] * bool(names)
    lines += [
      f"  {name or 'the result'}: {self.array_errors[name]:.2g}"
      for name in names[:_MAX_ARRAYS]
    ]
    lines += _reports.format_rest(names, _MAX_ARRAYS, more)
    expected = [x or "the result" for x in self.ill_conditioned_arrays]
    if expected:
      lines.append(
        f"In {self.dtype}, errors of {_reports.format_names(expected)} are"
        " expected, since the function amplifies any rounding."
      )
    return lines


class LossScale(NamedTuple):
  """The loss scale of a step.

  Attributes:
    value: its value; None if it is unknown, or there are several.
    lowest: the lowest value that the policy allows; None if unknown.
    can_decrease: whether the step is skipped after an overflow, and returns the
      state with a decreased scale.
  """

  value: float | None = None
  lowest: float | None = None
  can_decrease: bool = False


def find_problems(
  report: PrecisionComparison, loss_scale: LossScale | None = None
) -> list[_reports.Problem]:
  """Return the problems that a comparison found, each with a fix."""
  if report.reference_is_zero or not report.reference_is_finite:
    return []
  if report.overflowing:
    return [
      _suggest_float32(
        row,
        f"{row.name} overflows in the forward pass: max abs {row.amax:.2g},"
        f" {row.dtype} ends at {float(jnp.finfo(row.dtype).max):.5g}.",
      )
      for row in map(report.get_row, report.overflowing)
    ]
  if report.suggested_log2_scale_change:
    return [_suggest_rescale(report, loss_scale or LossScale())]
  # The limit for an outlier is lower than that for the error of all layers.
  if report.outliers:
    return [
      _suggest_float32(
        row,
        f"{row.name} loses precision in {row.dtype}: relative error"
        f" {row.isolated_error:.2g} from this layer alone.",
      )
      for row in map(report.get_row, report.outliers)
    ]
  if report.is_accurate or not math.isfinite(report.error):
    return []
  return [_explain_large_error(report)]


def _explain_large_error(report: PrecisionComparison) -> _reports.Problem:
  """Return the problem of an error that no layer causes alone."""
  details = f"relative error {report.error:.2g}"
  for name in filter(None, report.inaccurate_arrays[:1]):
    details += f", largest in {name}: {report.array_errors[name]:.2g}"
  names = list(dict.fromkeys(row.name for row in report.layers))[:_MAX_LAYERS]
  rows = list(map(report.get_row, names))
  layers = ", ".join(f"{x.name} ({x.isolated_error:.2g})" for x in rows)
  return _reports.Problem(
    f"The {report.target} are inaccurate in {report.dtype}: {details}. No layer"
    f" alone explains it; the largest errors of single layers: {layers}.",
    f"Run some of the layers in float32: {_format_fix(rows)}",
  )


def _suggest_float32(
  row: _reports.LayerPrecision, cause: str
) -> _reports.Problem:
  """Return a problem whose fix is to compute a layer in float32."""
  names = (row.name,) if row.in_autocast else ()
  return _reports.Problem(cause, _format_fix([row]), keep_float32=names)


def _format_fix(rows: Sequence[_reports.LayerPrecision]) -> str:
  """Return how to compute layers in float32."""
  names = [row.name for row in rows if row.in_autocast]
  lines = [row.name_with_line for row in rows if not row.in_autocast]
  value = names[0] if len(names) == 1 else names
  cast = f"ols.autocast(loss_fn, keep_float32={value!r})"
  written = f"Compute in float32 in {', '.join(lines)}: x.astype(jnp.float32)."
  return "; ".join([cast] * bool(names) + [written] * bool(lines))


def _suggest_rescale(
  report: PrecisionComparison, loss_scale: LossScale
) -> _reports.Problem:
  """Return a problem whose fix is another loss scale."""
  log2_change = report.suggested_log2_scale_change
  if log2_change < 0:
    consequence = ", so this step is skipped" * loss_scale.can_decrease
    cause = f"The backward pass overflows{consequence}"
  else:
    name = [*report.inaccurate_arrays, ""][0]
    error = report.array_errors.get(name, report.error)
    cause = (
      f"{name or 'The ' + report.target.removesuffix('s')} underflows in the"
      f" backward pass: relative error {error:.2g}"
    )
  if loss_scale.value is None:
    return _reports.Problem(
      f"{cause}.",
      f"Lower the loss scale by 2**{-log2_change}."
      if log2_change < 0
      else f"Scale the loss by 2**{log2_change}, or raise the loss scale by so"
      " much: tx = ols.with_loss_scaling(optimizer), and"
      " ols.value_and_grad(loss_fn, opt_state).",
    )
  new_scale = loss_scale.value * 2.0**log2_change
  cause = f"{cause} (loss scale {loss_scale.value:g})."
  if new_scale < (loss_scale.lowest or 0.0):
    return _reports.Problem(
      cause,
      f"The loss scale must decrease to {new_scale:g}, but min_scale of its"
      f" policy stops it at {loss_scale.lowest:g}, and every step is skipped."
      " Lower min_scale, as in"
      f" ols.DynamicLossScale(min_scale={new_scale:g}), or make the loss"
      " smaller.",
    )
  fix = f"opt_state = ols.set_loss_scale(opt_state, {new_scale:g})"
  fix += "; a dynamic loss scale also decreases on its own" * (
    log2_change < 0 and loss_scale.can_decrease
  )
  return _reports.Problem(cause, fix, loss_scale=new_scale)


def _as_cells(row: _reports.LayerPrecision) -> dict[str, str]:
  return _reports.format_location_cells(row) | {
    "error alone": f"{row.isolated_error:.1e}",
    "amax": f"{row.amax:.3g}",
    "log2 headroom": f"{row.log2_headroom:.1f}",
    "underflow": f"{row.underflow_fraction:.1%}",
    "subnormal": f"{row.subnormal_fraction:.1%}",
    "count": str(row.run_count),
  }
