"""How precise a function is in half precision, and how much of it runs in it.

* ``_compare_precision`` compares a function with itself in float32, and
  measures its layers.
* ``_count_flops`` counts the FLOPs in each dtype.
"""
