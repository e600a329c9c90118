"""The report of ``compare_precision``."""

from collections.abc import Sequence
import dataclasses
import math

from optax_lossscale.diagnostics import _reports

_MAX_ROWS = 20
_MAX_ARRAYS = 3


@dataclasses.dataclass(frozen=True)
class PrecisionComparison(_reports.PrintedReport):
  """The report of :func:`compare_precision`: which layers lose precision.

  Attributes:
    dtype: the dtype that is compared with float32, as a string.
    target: the arrays that are compared: ``"gradients"`` that the optimizer
      receives, or ``"results"`` of the function.
    reference_is_zero: whether all compared arrays are zero in float32, so that
      there is nothing to compare.
    error: the norm of the difference over the norm in float32, of all compared
      arrays together, without ``ill_conditioned_arrays``; inf if they are not
      finite. If there are several results, or several
      ``update``, it is the largest error of one of them.
    reference_is_finite: whether all compared arrays are finite in float32. If
      not, the report names no layer: find_overflow names the operation.
    outliers: the names of the layers that cause a far larger error of an array
      than all other layers together, the worst first; often empty.
    array_errors: the relative error of each array that is compared, by its
      path, such as ``blocks/0/up``, which is also what ``keep_float32=`` takes.
      The gradients of several ``update`` begin with ``[0]/``, ``[1]/`` and so
      on. If a key holds a ``/``, so that two paths of a tree would be spelled
      alike, each such key of this tree is quoted, as in ``'a/b'/w``.
    layers: a :class:`LayerPrecision` for each layer and pass that rounds to
      half precision, the one with the largest isolated error first.
      :func:`check_step` measures layers only if an error is large, and after
      an overflow only those that overflow.
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
      lines.append(
        f"{self._format_worst_array()} underflows in the backward pass: raise"
        f" the loss scale by 2**{log2_change}."
      )
    # If the forward pass overflows, an infinite error is not the fault of a
    # single layer.
    infinite_error_names = {
      row.name for row in self.layers if row.isolated_error == math.inf
    }
    excluded_names = infinite_error_names if self.overflowing else ()
    outliers = [x for x in self.outliers if x not in excluded_names]
    if outliers:
      label = "Outlier" if len(outliers) == 1 else f"{len(outliers)} outliers"
      lines.append(f"{label}: {self.format_fix(outliers)}.")
    if lines:
      return lines
    if not self.is_accurate:
      return ["The error is large, and no single layer dominates it."]
    suffix = "" if self.ill_conditioned_arrays else ", which is small"
    return [f"No single layer dominates the error{suffix}."]

  def _format_worst_array(self) -> str:
    return [*self.inaccurate_arrays, "The result"][0] or "The result"

  def format_fix(self, names: Sequence[str]) -> str:
    """Returns how to compute these layers in float32."""
    in_autocast = {row.name for row in self.layers if row.in_autocast}
    cast = [name for name in names if name in in_autocast]
    written = [name for name in names if name not in in_autocast]
    parts = [_format_keep_float32(cast)] if cast else []
    if written:
      lines = ", ".join(self.get_row(name).name_with_line for name in written)
      parts.append(f"compute in float32 in {lines}: x.astype(jnp.float32)")
    return "; ".join(parts)

  def _format_forward_overflows(self) -> str:
    rows = [row for row in self.layers if row.name in self.overflowing]
    if len(self.overflowing) == 1:
      return (
        f"1 layer overflows in the forward pass: {self.overflowing[0]}. Run it"
        f" in float32: {self.format_fix(self.overflowing)}."
      )
    first_row = min(rows, key=lambda row: row.program_index)
    is_long = len(self.overflowing) > _MAX_ARRAYS
    fix = self.format_fix(self.overflowing)
    if is_long and all(row.in_autocast for row in rows):
      fix = "keep_float32=report.overflowing"
    return (
      f"{len(self.overflowing)} layers overflow in the forward pass, first"
      f" {first_row.name}. Run them in float32: {fix}."
    )

  def _format_errors(self) -> str:
    """Return the line with the error of all arrays together."""
    num_arrays = len(self.array_errors)
    arrays = self.target if num_arrays != 1 else self.target.removesuffix("s")
    if self.target == "gradients":
      arrays += " that the optimizer receives"
    return (
      f"Relative error in {self.dtype}: {self.error:.2g} ({num_arrays}"
      f" {arrays})."
    )

  def _format_arrays(self) -> list[str]:
    """Return the lines on the largest errors, and on expected ones."""
    shown_names = self.inaccurate_arrays[:_MAX_ARRAYS]
    rows = [
      f"  {name or 'the result'}: {self.array_errors[name]:.2g}"
      for name in shown_names
    ]
    lines = ["Largest relative errors:", *rows] if rows else []
    num_hidden = len(self.inaccurate_arrays) - len(rows)
    lines += (
      [f"  (+{num_hidden} more: report.inaccurate_arrays)"]
      if num_hidden
      else []
    )
    names = [x or "the result" for x in self.ill_conditioned_arrays]
    if names:
      num_hidden = len(names) - _MAX_ARRAYS
      more = f" and {num_hidden} more" if num_hidden > 0 else ""
      lines.append(
        "The function amplifies any rounding, so these errors are expected in"
        f" {self.dtype}: {', '.join(names[:_MAX_ARRAYS])}{more}."
      )
    return lines

  def _format_table(self) -> list[str]:
    """Return the table of layers."""
    if not self.layers:
      return []
    rows = [_as_cells(row) for row in self.layers[:_MAX_ROWS]]
    lines = [_reports.format_table(rows, num_left_aligned=2)]
    num_hidden = len(self.layers) - _MAX_ROWS
    if num_hidden > 0:
      lines.append(f"(+{num_hidden} more rows: report.layers)")
    return lines


def _format_keep_float32(names: Sequence[str]) -> str:
  """Return the argument of `autocast` that keeps layers in float32."""
  value = names[0] if len(names) == 1 else list(names)
  return f"keep_float32={value!r}"


def _as_cells(row: _reports.LayerPrecision) -> dict[str, str]:
  cells = {
    "error alone": (row.isolated_error, ".1e"),
    "amax": (row.amax, ".3g"),
    "log2 headroom": (row.log2_headroom, ".1f"),
    "underflow": (row.underflow_fraction, ".1%"),
    "subnormal": (row.subnormal_fraction, ".1%"),
    "count": (row.run_count, "d"),
  }
  return _reports.format_location_cells(row) | {
    name: "" if value is None else format(value, spec)
    for name, (value, spec) in cells.items()
  }
