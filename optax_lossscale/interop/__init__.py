"""Import and export loss-scaler settings and checkpoints of other systems.

The other systems are never imported: importers read dicts and attributes, and
exporters return dicts.
"""

from optax_lossscale.interop._keras import from_keras, to_keras
from optax_lossscale.interop._scalers import (
  from_flax,
  from_jmp,
  from_torch,
  to_flax,
  to_torch,
)

__all__ = [
  "from_flax",
  "from_jmp",
  "from_keras",
  "from_torch",
  "to_flax",
  "to_keras",
  "to_torch",
]


def __dir__() -> list[str]:
  return __all__
