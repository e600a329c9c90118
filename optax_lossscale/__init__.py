"""Loss scaling for Optax: float16 training in two changed lines."""

from optax_lossscale import interop as interop
from optax_lossscale._diagnostics import (
  finite_per_leaf,
  loss_scale_metrics,
  nonfinite_leaves,
)
from optax_lossscale._headroom import HeadroomLossScale
from optax_lossscale._policies import (
  DynamicLossScale,
  FixedLossScale,
  LossScale,
)
from optax_lossscale._probes import probe, probe_metrics, probe_slots
from optax_lossscale._report import gradient_report
from optax_lossscale._scaling import (
  all_finite,
  grad,
  scale_loss,
  unscale_grads,
  value_and_grad,
)
from optax_lossscale._state import (
  get_loss_scale_state,
  LossScaleState,
  select_if_finite,
  set_loss_scale,
)
from optax_lossscale._stuck import LossScaleError, raise_if_stuck
from optax_lossscale._wrapper import LossScalingState, with_loss_scaling

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "FixedLossScale",
  "HeadroomLossScale",
  "LossScale",
  "LossScaleError",
  "LossScaleState",
  "LossScalingState",
  "all_finite",
  "finite_per_leaf",
  "get_loss_scale_state",
  "grad",
  "gradient_report",
  "loss_scale_metrics",
  "nonfinite_leaves",
  "probe",
  "probe_metrics",
  "probe_slots",
  "raise_if_stuck",
  "scale_loss",
  "select_if_finite",
  "set_loss_scale",
  "unscale_grads",
  "value_and_grad",
  "with_loss_scaling",
]
