"""A row of a report: the operations of one layer, and their precision."""

from typing import NamedTuple


class LayerPrecision(NamedTuple):
  """Operations of one layer, in one pass of the program.

  :func:`precision_report` counts FLOPs, and :func:`compare_precision` measures
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
      ``noise_only_arrays``, if only these operations run in half precision; inf
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
    >>> report = diagnostics.precision_report(jnp.dot, jnp.eye(8), jnp.eye(8))
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
  def overflows(self) -> bool:
    """Whether a number exceeds the range of the dtype, if this was measured."""
    return self.log2_headroom is not None and self.log2_headroom < 0
