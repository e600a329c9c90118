"""Runs a float32 function with its products in half precision."""

from optax_lossscale._autocast._autocast import autocast, keep_float32
