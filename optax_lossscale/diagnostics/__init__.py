"""Find out what is not finite, where it comes from, and what float16 does.

``nonfinite_leaves``, ``gradient_report`` and ``find_overflow`` read values, and
are called outside of ``jit``. ``precision_report`` reads only shapes.
``finite_per_leaf`` and the probes are for use inside.
"""

from optax_lossscale.diagnostics._comparison._functions import compare_precision
from optax_lossscale.diagnostics._comparison._report import (
  FarOff,
  PrecisionComparison,
  ProductPrecision,
)
from optax_lossscale.diagnostics._gradients import (
  gradient_report,
  GradientReport,
  GradientStats,
)
from optax_lossscale.diagnostics._leaves import (
  finite_per_leaf,
  nonfinite_leaves,
  NonfiniteLeaf,
)
from optax_lossscale.diagnostics._overflow._finding import find_overflow
from optax_lossscale.diagnostics._overflow._report import Operand, Overflow
from optax_lossscale.diagnostics._precision import (
  Flops,
  precision_report,
  PrecisionReport,
  Risk,
  WideProduct,
)
from optax_lossscale.diagnostics._probes import (
  probe,
  probe_evidence,
  probe_metrics,
  probe_slots,
)

__all__ = [
  "FarOff",
  "Flops",
  "GradientReport",
  "GradientStats",
  "NonfiniteLeaf",
  "Operand",
  "Overflow",
  "PrecisionComparison",
  "PrecisionReport",
  "ProductPrecision",
  "Risk",
  "WideProduct",
  "compare_precision",
  "find_overflow",
  "finite_per_leaf",
  "gradient_report",
  "nonfinite_leaves",
  "precision_report",
  "probe",
  "probe_evidence",
  "probe_metrics",
  "probe_slots",
]

# Pickles and reprs name the path that stays when modules move.
for _name in __all__:
  if isinstance(globals()[_name], type):
    globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
  return __all__
