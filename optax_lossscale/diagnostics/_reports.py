"""The parts of reports: problems, rows for layers, tables, HTML."""

from collections.abc import Mapping, Sequence
import html
from typing import Any, NamedTuple

import numpy as np

_MAX_ROWS = 20


class PrintedReport:
  """A report, a dataclass, that a notebook shows like ``print`` does."""

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    return {
      name: _as_plain(value)
      for name, value in vars(self).items()
      if not name.startswith("_")
    }

  def _repr_html_(self) -> str:
    return f"<pre>{html.escape(str(self))}</pre>"


def _as_plain(x: Any) -> Any:
  """Return a report, or a part of it, as data that JSON can hold."""
  match x:
    case PrintedReport():
      return x.as_dict()
    case dict():
      return {key: _as_plain(value) for key, value in x.items()}
    case tuple() if hasattr(x, "_asdict"):
      return _as_plain(x._asdict())
    case tuple():
      return list(map(_as_plain, x))
    case np.dtype():
      return str(x)
    case _:
      return x


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


def fill_in_names(
  problem: Problem,
  names: Sequence[str] = (),
  all_names: Sequence[str] = (),
  **kwargs: Any,
) -> Problem:
  """Insert names into a message; none if all gradients are affected."""
  name_list = f" ({format_names(names)})"
  names_text = "" if len(names) == len(all_names) else name_list
  return problem._replace(
    cause=problem.cause.format(names=names_text, **kwargs)
  )


def format_names(names: Sequence[str]) -> str:
  """Return the first names of a list."""
  return f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"


class LayerPrecision(NamedTuple):
  """Operations of one layer, in one pass of the program.

  :func:`count_flops` counts FLOPs, and :func:`compare_precision` measures
  errors. A field that a report doesn't measure is None.

  Attributes:
    primitive: JAX's name of the operation; the first one if there are several,
      as in a normalization.
    name: the path of the weights or the scopes, with the line if they are
      ambiguous. For a matmul of :func:`optax_lossscale.autocast`, it is the
      name for ``keep_float32=``.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they are in the backward pass. A derivative inside the
      loss is part of the forward pass.
    dtype: the dtype of the operands of a matmul, the wider one of two; the
      dtype of the result of other operations.
    in_autocast: whether ``autocast`` runs them in this dtype, so that
      ``keep_float32=`` applies.
    run_count: the number of times that they run.
    flops: the FLOPs of their matmuls and convolutions.
    fraction: the fraction of the FLOPs of all matmuls and convolutions.
    isolated_error: the relative error of the compared arrays, without
      rounding noise, if only these operations run in half precision; inf
      if an array is not finite then.
    amax: the largest magnitude of operands and results, in float32.
    log2_headroom: log2 of the largest number of the dtype over ``amax``; they
      overflow if it is below zero.
    underflow_fraction: the fraction of entries that become zero, in the operand
      or result with the largest fraction.
    subnormal_fraction: the fraction of entries that become subnormal, in the
      operand or result with the largest fraction.
    program_index: the index among all rows in the order of the program; 0 for
      the first.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.count_flops(jnp.dot, jnp.eye(8), jnp.eye(8))
    >>> report.unconverted[0].primitive, report.unconverted[0].dtype
    ('dot_general', 'float32')
  """

  primitive: str
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool
  dtype: str
  in_autocast: bool
  run_count: int
  flops: int = 0
  fraction: float = 0.0
  isolated_error: float | None = None
  amax: float | None = None
  log2_headroom: float | None = None
  underflow_fraction: float | None = None
  subnormal_fraction: float | None = None
  program_index: int = 0

  @property
  def name_with_line(self) -> str:
    """The name, with the line of the user's code."""
    is_included = self.name.endswith(self.source_line)
    return self.name if is_included else f"{self.name} at {self.source_line}"

  @property
  def overflows(self) -> bool:
    """Whether a number exceeds the range of the dtype, if this was measured."""
    return self.log2_headroom is not None and self.log2_headroom < 0


def format_location_cells(
  row: LayerPrecision, *, has_line: bool = False
) -> dict[str, str]:
  """Return the first two cells of a row about an operation."""
  name = row.name_with_line if has_line else row.name
  backward_suffix = ", backward" if row.backward else ""
  return {"": row.primitive, "name": f"{name or 'unknown'}{backward_suffix}"}


def format_rest(items: Sequence[Any], num_shown: int, text: str) -> list[str]:
  """Return a line with the number of items that are not shown, if any."""
  num_hidden = len(items) - num_shown
  return [f"(+{num_hidden} {text})"] if num_hidden > 0 else []


def format_table(
  rows: Sequence[Mapping[str, str]],
  num_left_aligned: int,
  *,
  title: str = "",
  full_list: str = "",
) -> list[str]:
  """Format the first rows of a table, with a header.

  Args:
    rows: the rows, from the names of the columns to the cells.
    num_left_aligned: the number of columns, from the first one, that are
      aligned to the left.
    title: a line above the table.
    full_list: where to find all rows.

  Returns:
    The lines of the table; none if it has no rows.
  """
  if not rows:
    return []
  lines = [list(rows[0]), *(list(x.values()) for x in rows[:_MAX_ROWS])]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  align = lambda i, cell: (
    cell.ljust(widths[i]) if i < num_left_aligned else cell.rjust(widths[i])
  )
  return [
    *filter(None, [title]),
    *(
      "  ".join(align(*pair) for pair in enumerate(line)).rstrip()
      for line in lines
    ),
    *format_rest(rows, _MAX_ROWS, f"more rows: {full_list}"),
  ]
