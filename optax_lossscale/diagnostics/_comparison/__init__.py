"""Measure which layers lose the precision of gradients, by running them.

* ``_compare_precision`` is the public function, and decides what to run.
* ``_program`` has the programs: in float32, and with a flag and statistics for
  each layer. ``_float32_eqns`` evaluates an equation in float32, ``_layers``
  lists the layers, and ``_layers`` measures them.
* ``_runs`` runs the programs, and ``_output_errors`` compares their outputs.
* ``_measured_layers`` measures the layers, and ``_outliers`` judges them.
* ``_report`` is the report.
"""
