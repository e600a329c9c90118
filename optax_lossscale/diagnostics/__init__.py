"""Find overflow, underflow and lost precision in a training step.

Call ``check_step``, ``find_overflow``, ``compare_precision`` and
``nonfinite_leaves`` outside ``jit``, since they read values. ``count_flops``
reads only shapes. Use the probes inside ``jit``.
"""

from optax_lossscale.diagnostics._check_step import check_step, StepCheck
from optax_lossscale.diagnostics._eqn_stats import Operand
from optax_lossscale.diagnostics._leaves import (
  nonfinite_leaves,
  NonfiniteLeaf,
)
from optax_lossscale.diagnostics._overflow._find_overflow import find_overflow
from optax_lossscale.diagnostics._overflow._report import Overflow
from optax_lossscale.diagnostics._precision._compare_precision import (
  compare_precision,
)
from optax_lossscale.diagnostics._precision._comparison import (
  PrecisionComparison,
)
from optax_lossscale.diagnostics._precision._count_flops import (
  count_flops,
  FlopCount,
)
from optax_lossscale.diagnostics._probes import (
  probe,
  probe_counters,
  probe_metrics,
  probe_update_kwargs,
)
from optax_lossscale.diagnostics._reports import LayerPrecision, Problem

__all__ = [
  "FlopCount",
  "LayerPrecision",
  "NonfiniteLeaf",
  "Operand",
  "Overflow",
  "PrecisionComparison",
  "Problem",
  "StepCheck",
  "check_step",
  "compare_precision",
  "count_flops",
  "find_overflow",
  "nonfinite_leaves",
  "probe",
  "probe_counters",
  "probe_metrics",
  "probe_update_kwargs",
]

# Pickles and reprs contain the public path, which remains when modules move.
for _name in __all__:
  if isinstance(globals()[_name], type):
    globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
  return __all__
