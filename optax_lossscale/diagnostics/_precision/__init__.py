"""What runs in which dtype: walks through a function, and computes nothing."""

from optax_lossscale.diagnostics._precision._report import (
  Flops,
  precision_report,
  PrecisionReport,
  Risk,
  WideProduct,
)
