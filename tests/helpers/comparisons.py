"""Reports of `compare_precision`, made of plain data."""

from optax_lossscale import diagnostics

LINE = "model.py:3 (f)"


def make_layer(
  name,
  *,
  error=0.0,
  headroom=9.0,
  index=0,
  backward=False,
  in_autocast=True,
  source_line=LINE,
):
  """Return a row of a report, about a matmul in float16."""
  return diagnostics.LayerPrecision(
    primitive="dot_general",
    name=name,
    name_scope=name.split(" at ")[0],
    param_path="",
    source_line=source_line,
    backward=backward,
    dtype="float16",
    in_autocast=in_autocast,
    isolated_error=error,
    amax=1.0,
    log2_headroom=headroom,
    underflow_fraction=0.0,
    subnormal_fraction=0.0,
    run_count=1,
    program_index=index,
  )


def make_comparison(layers=(), **fields):
  """Return a report with a small error, apart from the fields that are given.

  The layers that overflow do so in the forward pass, by default.
  """
  overflowing = tuple(x.name for x in layers if x.overflows)
  defaults = {
    "dtype": "float16",
    "target": "gradients",
    "reference_is_zero": False,
    "error": 0.001,
    "reference_is_finite": True,
    "outliers": (),
    "array_errors": {},
    "limitations": (),
    "overflowing": overflowing,
  }
  return diagnostics.PrecisionComparison(
    layers=tuple(layers), **(defaults | fields)
  )
