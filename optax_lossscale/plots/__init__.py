"""Pictures of gradients, loss scales and precision, drawn with matplotlib."""

from optax_lossscale.plots._exponents import (
  exponent_histogram,
  ExponentHistogram,
  plot_exponents,
)
from optax_lossscale.plots._history import plot_loss_scale
from optax_lossscale.plots._products import plot_precision

__all__ = [
  "ExponentHistogram",
  "exponent_histogram",
  "plot_exponents",
  "plot_loss_scale",
  "plot_precision",
]

# Pickles and reprs name the path that stays when modules move.
ExponentHistogram.__module__ = __name__


def __dir__() -> list[str]:
  return __all__
