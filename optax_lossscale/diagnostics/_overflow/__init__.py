"""``find_overflow``: the operation that an inf or a NaN comes from.

The step runs as a compiled program that also returns flags for values inside of
it. If an output is not finite, a second program measures the equations between
the last finite values and the first nonfinite ones. ``_origins`` describes the
algorithm, and ARCHITECTURE.md the modules.
"""
