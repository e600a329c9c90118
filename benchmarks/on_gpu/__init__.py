"""What benchmarks/gpu.py measures, and how.

``command`` starts one process for each part of the plan, since JAX and torch
would otherwise hold the memory of the device from each other, and writes down
what these processes tell it.
"""
