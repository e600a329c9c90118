"""Measure which matmuls lose the precision of gradients, by running them.

* ``_compare_precision`` is the public function, and decides which runs to do.
* ``_program`` evaluates the function with a mode for each matmul: float32, half
  precision, or slightly perturbed float32.
* ``_report`` searches for the layers with the largest errors, and prints them.
"""
