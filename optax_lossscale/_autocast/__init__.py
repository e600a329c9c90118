"""Runs the matmuls and convolutions of a float32 function in half precision."""

from optax_lossscale._autocast._autocast import autocast, keep_float32
