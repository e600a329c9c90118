"""The report of ``precision_report``: FLOPs by dtype, operations at risk."""

import dataclasses
from typing import Any, NamedTuple

from optax_lossscale.diagnostics import _report_format


class Flops(NamedTuple):
  """The matmuls and convolutions of one pair of dtypes.

  Attributes:
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result. XLA accumulates 16-bit matmuls in
      float32, and rounds the result once.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, *[jnp.eye(8)] * 2)
    >>> report.flops[0].operand_dtype, report.flops[0].flops
    ('float32', 1024)
  """

  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float


class UnconvertedMatmul(NamedTuple):
  """Matmuls or convolutions of one layer whose operands are in a wider dtype.

  Attributes:
    primitive: JAX's name of the operation.
    operand_dtype: the dtype of the operands; the wider one of two.
    result_dtype: the dtype of the result.
    flops: the number of floating-point operations.
    fraction: the fraction of all FLOPs.
    run_count: the number of times that they run.
    name: the name for ``keep_float32=`` of :func:`optax_lossscale.autocast`:
      the path of the weights or the scopes, with the line if they are
      ambiguous.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.dot, jnp.eye(8), jnp.eye(8))
    >>> report.unconverted[0].primitive, report.unconverted[0].operand_dtype
    ('dot_general', 'float32')
  """

  primitive: str
  operand_dtype: str
  result_dtype: str
  flops: int
  fraction: float
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


class Risk(NamedTuple):
  """Operations of one line that may overflow or underflow.

  Attributes:
    primitive: JAX's name of the operation.
    reason: how they may overflow or underflow.
    run_count: the number of times that they run.
    name: the name for ``keep_float32=`` of :func:`optax_lossscale.autocast`:
      the path of the weights or the scopes, with the line if they are
      ambiguous.
    name_scope: the scopes around it, such as ``"Net/block1"``; often empty.
    param_path: the path of the parameter, such as ``"blocks/2/up"``; often
      empty.
    source_line: the user's line, such as ``"model.py:32 (Block.__call__)"``.
    backward: whether they belong to the backward pass. A derivative inside of
      the loss is part of the forward pass.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(jnp.exp, jnp.ones(8, jnp.float16))
    >>> report.at_risk[0].reason
    'exp overflows above 11.1'
  """

  primitive: str
  reason: str
  run_count: int
  name: str
  name_scope: str
  param_path: str
  source_line: str
  backward: bool


@dataclasses.dataclass(frozen=True)
class PrecisionReport(_report_format.PrintedReport):
  """The report of :func:`precision_report`: how much runs in which dtype.

  Attributes:
    dtype: the dtype in which the function should compute, as a string.
    total_flops: the FLOPs of all matmuls and convolutions outside of the
      optimizer.
    fraction: the fraction of them whose operands are in this dtype, or in
      another dtype with as few bits; 1.0 if there are none.
    flops: a :class:`Flops` for each pair of dtypes, the largest first.
    unconverted: a :class:`UnconvertedMatmul` for each layer whose operands are
      in a wider dtype, the largest first.
    at_risk: a :class:`Risk` for each line with an operation in this dtype that
      may overflow or underflow, in the order of the program.
    limitations: the parts of the program that were not analyzed.
    warnings: mistakes in the training step as a whole, in sentences: ``update``
      receives gradients that are not scaled as it expects.
    optimizer_flops: the FLOPs of the matmuls and convolutions of the optimizer
      that :func:`~optax_lossscale.with_loss_scaling` wraps, such as Muon. No
      other field counts them.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> from optax_lossscale import diagnostics
    >>> report = diagnostics.precision_report(
    ...   ols.autocast(jnp.dot), jnp.eye(8), jnp.eye(8))
    >>> report.fraction, report.unconverted
    (1.0, ())
  """

  dtype: str
  total_flops: int
  fraction: float
  flops: tuple[Flops, ...]
  unconverted: tuple[UnconvertedMatmul, ...]
  at_risk: tuple[Risk, ...]
  limitations: tuple[str, ...]
  warnings: tuple[str, ...] = ()
  optimizer_flops: int = 0

  def as_dict(self) -> dict[str, Any]:
    """Returns the report as dicts and lists, for machines."""
    return vars(self) | {
      "flops": [row._asdict() for row in self.flops],
      "unconverted": [row._asdict() for row in self.unconverted],
      "at_risk": [row._asdict() for row in self.at_risk],
      "limitations": list(self.limitations),
      "warnings": list(self.warnings),
    }

  def __str__(self) -> str:
    flops = [
      {
        "operand dtype": row.operand_dtype,
        "result dtype": row.result_dtype,
        "flops": f"{row.flops:.3g}",
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.flops
    ]
    unconverted = [
      _report_format.format_location_cells(row)
      | {
        "operand dtype": row.operand_dtype,
        "count": str(row.run_count),
        "fraction": f"{row.fraction:.1%}",
      }
      for row in self.unconverted
    ]
    at_risk = [
      _report_format.format_location_cells(row)
      | {"count": str(row.run_count), "reason": row.reason}
      for row in self.at_risk
    ]
    optimizer_line = (
      f"FLOPs of the matmuls of the optimizer: {self.optimizer_flops:.3g}, not"
      " counted below."
    )
    parts = [
      *self.warnings,
      *self._format_conclusion(),
      *[optimizer_line] * bool(self.optimizer_flops),
      *(f"Not analyzed: {limitation}" for limitation in self.limitations),
    ]
    for title, rows, num_left_aligned in (
      (f"FLOPs of matmuls and convolutions: {self.total_flops:.3g}", flops, 2),
      (f"Matmuls and convolutions not in {self.dtype}:", unconverted, 3),
      (f"At risk in {self.dtype}:", at_risk, 4),
    ):
      parts += (
        [title, _report_format.format_table(rows, num_left_aligned)]
        if rows
        else []
      )
    return "\n".join(parts)

  def _format_conclusion(self) -> list[str]:
    """Return the fraction that runs in the dtype, and how to raise it."""
    if not self.flops:
      suffix = " outside of the optimizer" * bool(self.optimizer_flops)
      return [f"The function has no matmuls and no convolutions{suffix}."]
    autocast = "ols.autocast(loss_fn)"
    if self.dtype != "float16":
      autocast = f"ols.autocast(loss_fn, jnp.{self.dtype})"
    lines = [
      f"{self.fraction:.1%} of the matmul and convolution FLOPs run in"
      f" {self.dtype}."
    ]
    if self.unconverted:
      lines.append(
        f"Fix: {autocast}, or cast the operands of the layers below. (Ignore"
        " this for layers that you keep in float32.)"
      )
    return lines
