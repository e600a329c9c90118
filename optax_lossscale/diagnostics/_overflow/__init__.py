"""Find the operation that made the result of a function inf or NaN.

* ``_find_overflow`` is the public function: it runs the compiled program and,
  if a result is not finite, interprets the program.
* ``_taint_interpreter`` evaluates a jaxpr eqn by eqn, on the arrays and devices
  that ``_runners`` handles, and enters calls, branches and loops (``_loops``).
* ``_taint`` tracks which origin each nonfinite entry comes from, with arrays of
  bits on the host (``_taint_arrays``).
* ``_report`` describes the origin and suggests a fix.
"""
