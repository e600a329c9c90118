"""The report of ``compare_precision``."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from optax_lossscale.diagnostics import _report_format

_MAX_ROWS = 20
_MAX_ARRAYS = 3
_NOTHING_MEASURED = (
  "No layer was measured alone, since no error is to be explained:"
  ' search="exhaustive" measures each layer.'
)


class MatmulPrecision(NamedTuple):
  """Matmuls or convolutions of one layer, in half precision.

  Attributes:
    primitive: JAX's name of the operation.
    name: the name for ``keep_float32=`` of :func:`optax_lossscale.autocast`:
      the path of the weights or the scopes, with the line if they are
      ambiguous.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they are in the backward pass. A derivative inside the
      loss is part of the forward pass.
    isolated_error: the relative error of the compared arrays, without
      ``noise_only_arrays``, if only these matmuls run in half precision; inf if
      an array is not finite then. With ``search="bisect"``, layers that were
      measured together share their error, and matmuls that overflow are not
      measured: their error is inf.
    amax: the largest magnitude of operands and results, in float32.
    log2_headroom: log2 of the largest number of the dtype over ``amax``; they
      overflow if it is below zero.
    underflow_fraction: the fraction of entries that become zero, in the operand
      or result with the largest fraction.
    subnormal_fraction: the fraction of entries that become subnormal, in the
      operand or result with the largest fraction.
    run_count: the number of times that they run.
    program_index: the index among all rows in the order of the program; 0 for
      the first.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> loss_fn = ols.autocast(lambda params, x: jnp.sum(x @ params["w"]))
    >>> report = diagnostics.compare_precision(
    ...   loss_fn, {"w": jnp.eye(4)}, jnp.ones((2, 4)), progress=False)
    >>> row = report.matmuls[0]
    >>> row.name, row.backward, row.run_count
    ('w', False, 1)
  """

  primitive: str
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool
  isolated_error: float
  amax: float
  log2_headroom: float
  underflow_fraction: float
  subnormal_fraction: float
  run_count: int
  program_index: int


class ArrayError(NamedTuple):
  """An array that is inaccurate in half precision, but not in float32.

  Attributes:
    name: its path, such as ``"blocks/0/up"``.
    error: its relative error; inf if it is not finite, or is zero in float32.
    norm_fraction: its norm as a fraction of the norm of all arrays.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> def difference(params, x):
    ...   return x @ params["w"] - 2048.0
    >>> report = diagnostics.compare_precision(
    ...   ols.autocast(difference), {"w": jnp.array([[2049.0]] * 2)},
    ...   jnp.array([[1.0, 0.0], [1.0, 0.0]]), progress=False)
    >>> report.inaccurate_arrays[0].error
    1.0
  """

  name: str
  error: float
  norm_fraction: float


@dataclasses.dataclass(frozen=True)
class PrecisionComparison(_report_format.PrintedReport):
  """The report of :func:`compare_precision`: which layers lose precision.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    target: the arrays that are compared: ``"gradients"`` that the optimizer
      receives, or ``"results"`` of the function.
    reference_is_zero: whether all compared arrays are zero in float32, so that
      there is nothing to compare.
    error: the norm of the difference over the norm in float32, of all compared
      arrays together; inf if they are not finite. If there are several results,
      or several ``update``, it is the largest error of one of them.
    cosine: the smallest cosine between the results in half precision and in
      float32.
    reference_is_finite: whether all compared arrays are finite in float32. If
      not, the report names no layer: find_overflow names the operation.
    outliers: the names of the layers that cause a far larger error of an array
      than all other layers together, the worst first; often empty.
    array_errors: the relative error of each array that is compared, by its
      path, such as ``blocks/0/up``, which is also what ``keep_float32=`` takes.
      The gradients of several ``update`` begin with ``[0]/``, ``[1]/`` and so
      on. If a key holds a ``/``, so that two paths of a tree would be spelled
      alike, each such key of this tree is quoted, as in ``'a/b'/w``.
    matmuls: a :class:`MatmulPrecision` for the matmuls and convolutions of each
      layer, the one with the largest isolated error first. With
      ``search="bisect"``, there are none if no error is large, and only those
      that overflow if that is why an array is not finite.
    limitations: the parts of the program that were not analyzed, in sentences.
    warnings: mistakes in the training step as a whole, in sentences: ``update``
      did not run, does not see an overflow, or receives gradients that are not
      scaled as it expects.
    noise_only_arrays: the names of arrays that are only rounding noise in
      float32, too, such as the gradient of a bias in front of a normalization.
      No layer is to blame for their errors.
    inaccurate_arrays: a :class:`ArrayError` for each of the other arrays whose
      error is above 64 times the spacing of numbers at 1 (in float16, 0.06),
      the largest first.
    suggested_log2_scale_change: log2 of the factor by which to change the loss
      scale; 0 if the loss scale is not the cause. Below zero, only the backward
      pass overflows: lower the scale by this factor. Above zero, the array with
      the largest error underflows in the backward pass: raise the scale, at
      most by this factor.

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
  cosine: float
  reference_is_finite: bool
  outliers: tuple[str, ...]
  array_errors: dict[str, float]
  matmuls: tuple[MatmulPrecision, ...]
  limitations: tuple[str, ...]
  warnings: tuple[str, ...] = ()
  noise_only_arrays: tuple[str, ...] = ()
  inaccurate_arrays: tuple[ArrayError, ...] = ()
  suggested_log2_scale_change: int = 0

  @property
  def overflowing(self) -> tuple[str, ...]:
    """The names of the layers that overflow in the forward pass.

    The layer with the largest numbers comes first. Layers that overflow only in
    the backward pass are not included: a lower loss scale helps them. A
    derivative inside the loss, such as a force or the derivative of a
    differential equation, is part of the forward pass: if it overflows, the
    loss is not finite at any scale.
    """
    rows = sorted(self._overflowing_rows(), key=lambda row: row.log2_headroom)
    return tuple(dict.fromkeys(row.name for row in rows))

  def _overflowing_rows(self) -> list[MatmulPrecision]:
    rows = [r for r in self.matmuls if r.log2_headroom < 0 and not r.backward]
    return [row for row in rows if row.name and self.reference_is_finite]

  def top_outliers(self, n: int = 1) -> tuple[str, ...]:
    """Returns the names of the worst outliers.

    Args:
      n: the largest number of names.

    Returns:
      At most ``n`` names for ``keep_float32=`` of
      :func:`optax_lossscale.autocast`, the worst first. There are none if no
      layer is much worse than the others.
    """
    return self.outliers[:n]

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    return vars(self) | {
      "inaccurate_arrays": [row._asdict() for row in self.inaccurate_arrays],
      "matmuls": [row._asdict() for row in self.matmuls],
      "limitations": list(self.limitations),
      "warnings": list(self.warnings),
    }

  def __str__(self) -> str:
    lines = [*self.warnings, *self._format_conclusion(), self._format_errors()]
    lines += self.limitations
    # After an overflow, most errors are infinite and do not identify a layer.
    has_overflow = self.overflowing or self.suggested_log2_scale_change < 0
    if self.reference_is_finite and not has_overflow:
      lines += self._format_arrays()
    return "\n".join([*lines, *self._format_table()])

  def _format_conclusion(self) -> list[str]:
    """Return the cause of the errors and the fix, in a few sentences."""
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
    log2_change = self.suggested_log2_scale_change
    if log2_change < 0:
      return [
        "Only the backward pass overflows: lower the loss scale by"
        f" 2**{-log2_change}, and compare again."
      ]
    lines = []
    if self.overflowing:
      lines.append(self._format_forward_overflows())
    if log2_change > 0:
      name = self.inaccurate_arrays[0].name or "The result"
      lines.append(
        f"{name} underflows in the backward pass: raise the loss scale by up to"
        f" 2**{log2_change}."
      )
    # If the forward pass overflows, an infinite error is not the fault of a
    # single layer.
    infinite_error_names = {
      row.name for row in self.matmuls if math.isinf(row.isolated_error)
    }
    excluded_names = infinite_error_names if self.overflowing else ()
    outliers = [x for x in self.outliers if x not in excluded_names]
    if outliers:
      label = "Outlier" if len(outliers) == 1 else f"{len(outliers)} outliers"
      lines.append(f"{label}: {_format_keep_float32(outliers)}.")
    return lines or ["No single layer dominates the error."]

  def _format_forward_overflows(self) -> str:
    keep_arg = _format_keep_float32(self.overflowing)
    if len(self.overflowing) == 1:
      return (
        f"1 layer overflows in the forward pass: {self.overflowing[0]}. Keep it"
        f" in float32: {keep_arg}."
      )
    first_row = min(self._overflowing_rows(), key=lambda row: row.program_index)
    if len(self.overflowing) > _MAX_ARRAYS:
      keep_arg = "keep_float32=report.overflowing"
    return (
      f"{len(self.overflowing)} layers overflow in the forward pass, first"
      f" {first_row.name}. Keep them in float32: {keep_arg}."
    )

  def _format_errors(self) -> str:
    """Return the line with the error of all arrays together."""
    num_arrays = len(self.array_errors)
    arrays = self.target if num_arrays != 1 else self.target.removesuffix("s")
    if self.target == "gradients":
      arrays += " that the optimizer receives"
    return (
      f"Relative error in {self.dtype}: {self.error:.2g}, cosine"
      f" {self.cosine:.7g} ({num_arrays} {arrays})."
    )

  def _format_arrays(self) -> list[str]:
    """Return the lines on the largest errors, and on arrays of noise."""
    rows = [
      f"  {name or 'the result'}: {error:.2g} ({fraction:.2g} of the norm)"
      for name, error, fraction in self.inaccurate_arrays[:_MAX_ARRAYS]
    ]
    lines = ["Largest relative errors:", *rows] if rows else []
    num_hidden = len(self.inaccurate_arrays) - len(rows)
    lines += (
      [f"  (+{num_hidden} more: report.inaccurate_arrays)"]
      if num_hidden
      else []
    )
    inaccurate_names = {array.name for array in self.inaccurate_arrays}
    noise_names = [
      x or "the result"
      for x in self.noise_only_arrays
      if x not in inaccurate_names
    ]
    if noise_names:
      shown_names, num_hidden = (
        noise_names[:_MAX_ARRAYS],
        len(noise_names) - _MAX_ARRAYS,
      )
      more = f" and {num_hidden} more" if num_hidden > 0 else ""
      lines.append(
        "Only rounding noise in float32, too, so no layer is to blame:"
        f" {', '.join(shown_names)}{more}."
      )
    return lines

  def _format_table(self) -> list[str]:
    """Return the table of matmuls, or why there is none."""
    if not self.matmuls:
      can_measure = self.reference_is_finite and not self.reference_is_zero
      return [_NOTHING_MEASURED] if can_measure else []
    rows = [_as_cells(row) for row in self.matmuls[:_MAX_ROWS]]
    lines = [_report_format.format_table(rows, num_left_aligned=2)]
    num_hidden = len(self.matmuls) - _MAX_ROWS
    if num_hidden > 0:
      lines.append(f"(+{num_hidden} more rows: report.matmuls)")
    return lines


def _format_keep_float32(names: Sequence[str]) -> str:
  """Return the argument of `autocast` that keeps layers in float32."""
  value = names[0] if len(names) == 1 else list(names)
  return f"keep_float32={value!r}"


def _as_cells(row: MatmulPrecision) -> dict[str, str]:
  return _report_format.format_location_cells(row) | {
    "error alone": f"{row.isolated_error:.1e}",
    "amax": f"{row.amax:.3g}",
    "log2 headroom": f"{row.log2_headroom:.1f}",
    "underflow": f"{row.underflow_fraction:.1%}",
    "subnormal": f"{row.subnormal_fraction:.1%}",
    "count": str(row.run_count),
  }


def compute_log2_scale_excess(report: PrecisionComparison) -> int:
  """Return log2 of the factor by which the loss scale is too large.

  The loss scale is too large if the backward pass overflows, and the forward
  pass does not. Then no layer is to blame. Otherwise, return 0.
  """
  backward_headrooms = [
    row.log2_headroom for row in report.matmuls if row.backward
  ]
  overflow_log2 = -min(backward_headrooms, default=0.0)
  is_forward_finite = report.reference_is_finite and not report.overflowing
  return (
    math.ceil(overflow_log2)
    if is_forward_finite and 0 < overflow_log2 < math.inf
    else 0
  )
