"""Loss scaling for Optax: float16 training in two changed lines."""

import importlib
import types
from typing import TYPE_CHECKING

from optax_lossscale._autocast import autocast, keep_float32
from optax_lossscale._grads import all_finite
from optax_lossscale._master_weights import (
  get_master_weights,
  MasterWeightsState,
  with_master_weights,
)
from optax_lossscale._monitoring import (
  loss_scale_metrics,
  LossScaleError,
  raise_if_stuck,
)
from optax_lossscale._policies import (
  DynamicLossScale,
  DynamicPolicyState,
  FixedLossScale,
  HeadroomLossScale,
  HeadroomPolicyState,
  LossScalePolicy,
)
from optax_lossscale._scaling import (
  grad,
  scale_loss,
  unscale_grads,
  value_and_grad,
)
from optax_lossscale._state import (
  get_loss_scale_state,
  LossScaleState,
  select_if_applied,
  set_loss_scale,
)
from optax_lossscale._wrapper import with_loss_scaling, WithLossScalingState

if TYPE_CHECKING:
  from optax_lossscale import diagnostics as diagnostics
  from optax_lossscale import interop as interop
  from optax_lossscale import plots as plots

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "DynamicPolicyState",
  "FixedLossScale",
  "HeadroomLossScale",
  "HeadroomPolicyState",
  "LossScaleError",
  "LossScalePolicy",
  "LossScaleState",
  "MasterWeightsState",
  "WithLossScalingState",
  "all_finite",
  "autocast",
  "get_loss_scale_state",
  "get_master_weights",
  "grad",
  "keep_float32",
  "loss_scale_metrics",
  "raise_if_stuck",
  "scale_loss",
  "select_if_applied",
  "set_loss_scale",
  "unscale_grads",
  "value_and_grad",
  "with_loss_scaling",
  "with_master_weights",
]

_SUBMODULES = ("diagnostics", "interop", "plots")

# Pickles and reprs name the path that stays when modules move.
for _name in __all__:
  if isinstance(globals()[_name], type):
    globals()[_name].__module__ = __name__


def __getattr__(name: str) -> types.ModuleType:
  """Loads a submodule on first use: a training run needs none of them."""
  if name in _SUBMODULES:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*__all__, *_SUBMODULES, "__version__"]
