"""Measure which matmuls lose the precision of gradients, by running them.

* ``_compare_precision`` is the public function, and makes the report.
* ``_runs`` decides which programs to compile, and runs them.
* ``_program`` has the programs: as trained, in float32, and with a flag and
  statistics for each matmul. ``_matmul_table`` lists the matmuls, and
  ``_site_stats`` measures them.
* ``_output_errors`` compares the outputs of two runs.
* ``_outliers`` searches for the layers with the largest errors.
* ``_report`` is the report.
"""
