"""Says by running which product loses the precision of the results."""

from optax_lossscale.diagnostics._comparison._functions import compare_precision
from optax_lossscale.diagnostics._comparison._report import (
  PrecisionComparison,
  ProductPrecision,
)
