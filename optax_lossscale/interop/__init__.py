"""Import and export loss-scaler settings and checkpoints of other systems.

The other systems are never imported: importers read dicts and attributes, and
exporters return dicts.
"""

from optax_lossscale.interop._apex import from_apex
from optax_lossscale.interop._deepspeed import from_deepspeed
from optax_lossscale.interop._fairseq import from_fairseq
from optax_lossscale.interop._flax import from_flax, to_flax
from optax_lossscale.interop._jmp import from_jmp
from optax_lossscale.interop._keras import from_keras, to_keras
from optax_lossscale.interop._loss_scales import (
  DeepSpeedLossScale,
  DeepSpeedPolicyState,
  FairseqLossScale,
  FairseqPolicyState,
)
from optax_lossscale.interop._megatron import from_megatron
from optax_lossscale.interop._paddle import from_paddle
from optax_lossscale.interop._torch import from_torch, to_torch

__all__ = [
  "DeepSpeedLossScale",
  "DeepSpeedPolicyState",
  "FairseqLossScale",
  "FairseqPolicyState",
  "from_apex",
  "from_deepspeed",
  "from_fairseq",
  "from_flax",
  "from_jmp",
  "from_keras",
  "from_megatron",
  "from_paddle",
  "from_torch",
  "to_flax",
  "to_keras",
  "to_torch",
]

# Pickles and reprs name the public module, so private modules can move.
for _name in __all__:
  if isinstance(globals()[_name], type):
    globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
  return __all__
