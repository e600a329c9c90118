"""``precision_report``: the dtypes in which a function computes, by location.

* ``_precision_report`` is the public function.
* ``_risks`` finds operations that may overflow or underflow.
* ``_report`` is the report.
"""
