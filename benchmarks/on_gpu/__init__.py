"""The parts of benchmarks/gpu.py.

``command`` starts one process for each part of the plan, since JAX and torch
would otherwise keep the memory of the device from each other.
"""
