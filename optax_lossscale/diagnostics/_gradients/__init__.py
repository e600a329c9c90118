"""What float16 does to gradients, at a loss scale."""

from optax_lossscale.diagnostics._gradients._report import (
  gradient_report,
  GradientReport,
  GradientStats,
)

__all__ = ["GradientReport", "GradientStats", "gradient_report"]
