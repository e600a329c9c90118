"""The text of a precision comparison, and the errors that it is made of."""

import dataclasses
import html
import json
import math
import pickle

from helpers.comparisons import LINE, make_comparison, make_layer
import jax
import numpy as np
import pytest

from optax_lossscale.diagnostics import _outputs
from optax_lossscale.diagnostics._precision import _errors

INF, NAN = math.inf, math.nan
NO_NOISE = np.array([False])
BAD = {"error": 0.5, "is_accurate": False}
SMALL = "No single layer dominates the error, which is small."


def overflow(name, index=0, **fields):
  return make_layer(name, error=INF, headroom=-1.0, index=index, **fields)


def outliers(*rows):
  names = tuple(row.name for row in rows)
  return {**BAD, "layers": rows, "outliers": names}


# The fields of a report, and the lines with which it begins.
CONCLUSIONS = {
  "a small error": ({}, [SMALL]),
  "nothing to compare": (
    {"reference_is_zero": True},
    ["All gradients are zero in float32, so there is nothing to compare."],
  ),
  "no reference": (
    {"reference_is_finite": False},
    ["The gradients are not finite in float32 either: find_overflow names"],
  ),
  "an outlier": (
    outliers(make_layer("a", error=0.25)),
    ["a loses precision in float16: relative error 0.25 from this layer alone.",
     "Fix: ols.autocast(loss_fn, keep_float32='a')"],
  ),
  "two outliers": (
    outliers(make_layer("c"), make_layer("a")),
    ["c loses", "Fix: ", "a loses", "Fix: "],
  ),
  "four outliers": (
    outliers(*map(make_layer, "abcd")),
    ["a loses", "Fix: ", "b loses", "Fix: ", "c loses", "Fix: ",
     "(+1 more: report.overflowing, report.outliers)"],
  ),
  "an outlier outside of autocast": (
    outliers(make_layer("b", in_autocast=False)),
    ["b loses", f"Fix: Compute in float32 in b at {LINE}: x.astype(jnp.float"],
  ),
  "an outlier on a line outside of autocast": (
    outliers(make_layer(f"c at {LINE}", in_autocast=False)),
    [f"c at {LINE} loses", f"Fix: Compute in float32 in c at {LINE}: x.as"],
  ),
  "an outlier with a small error": (
    {"layers": [make_layer("a")], "outliers": ("a",)},
    ["a loses precision in float16", "Fix: ols.autocast(loss_fn, keep_float3"],
  ),
  "a large error of no layer": (
    {**BAD, "array_errors": {"w": 0.7}, "inaccurate_arrays": ("w",)}
    | {"layers": [
      make_layer("a", error=0.2), make_layer("b", error=0.1, in_autocast=False),
      make_layer("c"), make_layer("d")
    ]},
    ["The gradients are inaccurate in float16: relative error 0.5, largest in"
     " w: 0.7. No layer alone explains it; the largest errors of single layers:"
     " a (0.2), b (0.1), c (0).",
     "Fix: Run some of the layers in float32: ols.autocast(loss_fn,"
     f" keep_float32=['a', 'c']); Compute in float32 in b at {LINE}: x.ast"],
  ),
  "an infinite error of no layer": (
    {**BAD, "error": INF}, ["No single layer dominates the error."]
  ),
  "an amplified error": (
    {"array_errors": {"w": 0.5}, "ill_conditioned_arrays": ("w",)},
    ["No single layer dominates the error."],
  ),
  "a loss scale that is too high": (
    {**BAD, "suggested_log2_scale_change": -3},
    ["The backward pass overflows.", "Fix: Lower the loss scale by 2**3."],
  ),
  "an underflow": (
    outliers(make_layer("w"))
    | {"array_errors": {"w": 0.5}, "inaccurate_arrays": ("w",)}
    | {"suggested_log2_scale_change": 4},
    ["w underflows in the backward pass: relative error 0.5.",
     "Fix: Scale the loss by 2**4, or raise the loss scale by so much: tx"],
  ),
  "an underflow of the result": (
    {**BAD, "suggested_log2_scale_change": 4, "target": "results"},
    ["The result underflows in the backward pass: relative error 0.5.",
     "Fix: Scale the loss by 2**4, or raise the loss scale by so much: tx"],
  ),
  # An outlier that overflows is not named twice.
  "an overflow": (
    outliers(overflow("a")),
    ["a overflows in the forward pass: max abs 1, float16 ends at 65504.",
     "Fix: ols.autocast(loss_fn, keep_float32='a')"],
  ),
  "four overflows": (
    {**BAD, "layers": [overflow(x, i) for i, x in enumerate("abcd")]},
    ["a overflows", "Fix: ", "b overflows", "Fix: ", "c overflows", "Fix: ",
     "(+1 more: report.overflowing, report.outliers)"],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_a_report_begins_with_its_conclusion(name):
  fields, conclusion = CONCLUSIONS[name]
  lines = str(make_comparison(**fields)).splitlines()
  beginnings = *conclusion, "Relative error in float16: "
  for line, beginning in zip(lines, beginnings, strict=False):
    assert line.startswith(beginning)


@pytest.mark.parametrize(
  "fields, line",
  [
    ({"array_errors": {"": 0.5}, "target": "results"}, "0.001 (1 result)."),
    (
      {"array_errors": {"a": 0.5, "b": 0}, "error": INF},
      "inf (2 gradients that the optimizer receives).",
    ),
  ],
)
def test_the_error_of_all_arrays_has_a_line(fields, line):
  lines = str(make_comparison(**fields)).splitlines()
  assert lines[1] == f"Relative error in float16: {line}"


def test_the_arrays_with_large_errors_are_listed():
  errors = {"": 0.9} | {name: i / 10 for i, name in enumerate("abcdefgh")}
  report = make_comparison(
    array_errors=errors,
    limitations=("Not analyzed: scan.",),
    inaccurate_arrays=("", "c", "b", "a"),
    ill_conditioned_arrays=("d", "e", "f", "g", "h"),
  )
  assert str(report).splitlines()[2:] == [
    "Not analyzed: scan.",
    "Largest relative errors:",
    "  the result: 0.9",
    "  c: 0.2",
    "  b: 0.1",
    "(+1 more: report.inaccurate_arrays)",
    "In float16, errors of d, e, f, ... are expected, since the function"
    " amplifies any rounding.",
  ]
  # After an overflow, most errors are infinite.
  for fields in (
    {"overflowing": ("a",), "layers": (overflow("a"),)},
    {"suggested_log2_scale_change": -1},
    {"reference_is_finite": False},
  ):
    text = str(dataclasses.replace(report, **fields))
    assert "Largest" not in text and "amplifies" not in text


def test_the_table_has_a_row_for_each_of_the_worst_layers():
  layers = [make_layer(f"layer{i}", backward=i == 1) for i in range(22)]
  lines = str(make_comparison(layers)).splitlines()
  assert lines[2].split()[:4] == ["name", "error", "alone", "amax"]
  assert max(map(len, lines)) <= 100
  rows = [line for line in lines if line.startswith("dot_general  layer")]
  assert len(rows) == 20
  assert rows[1].split()[1:4] == ["layer1,", "backward", "0.0e+00"]
  assert lines[-1] == "(+2 more rows: report.layers)"
  assert str(make_comparison(layers[:20])).splitlines() == lines[:-1]


def test_a_report_consists_of_plain_data_and_is_shown_in_notebooks():
  layers = [make_layer("a"), make_layer("b")]
  report = make_comparison(
    layers, outliers=("b", "a"), array_errors={"a<b": 0.5}
  )
  data = json.loads(json.dumps(report.as_dict()))
  assert data["layers"][0]["name_scope"] == "a"
  assert data["outliers"] == ["b", "a"]
  assert set(data) == {x.name for x in dataclasses.fields(report)}
  assert pickle.loads(pickle.dumps(report)) == report
  assert report.get_row("b") == layers[1]
  assert report._repr_html_() == f"<pre>{html.escape(str(report))}</pre>"


def measure(reference, other, groups=None):
  """Return the errors of arrays in half precision, and a function of a mask.

  The function returns the error of all arrays together, and then of each. By
  default all arrays are of one result; else `groups` has the index of each.
  """
  groups = groups or [0] * len(reference)
  outputs = [_outputs.Output("result", str(i), x) for i, x in enumerate(groups)]
  arrays = list(map(np.asarray, reference))
  comparison = _errors.OutputComparison(outputs, arrays)
  errors = comparison.compute_errors(list(map(np.asarray, other)))
  return errors, lambda mask: comparison.compute_effects(errors, mask)


def floats(*values):
  return np.array(values, np.float32)


# An array in float32 and in half precision, and the relative error.
PAIRS = [
  (floats(3, 4), floats(3, 4), 0),
  (floats(3, 4), floats(3, 4.5), 0.1),
  (floats(3, 4), floats(3, INF), INF),
  (floats(3, 4), floats(3, NAN), INF),
  # Relative to zero, any error is infinite.
  (floats(0, 0), floats(0, 0), 0),
  (floats(0, 0), floats(0, 1), INF),
  # The same inf is equal, such as a masked score.
  (floats(3, 4, -INF), floats(3, 4.5, -INF), 0.1),
  (floats(3, 4, INF), floats(3, 4, -INF), INF),
  # Squares of these are out of the range of float32, and of float64.
  (floats(3e30, 4e30), floats(3e30, 4.5e30), 0.1),
  (floats(3e-30, 4e-30), floats(3e-30, 4.5e-30), 0.1),
  (np.complex64([3j, 4]), np.complex64([3j, 4.5]), 0.1),
  # A result that is trained in half precision is float32 in the reference.
  (floats(2049), np.float16([2048]), 1 / 2049),
  (floats(), floats(), 0),
]


@pytest.mark.parametrize("reference, other, error", PAIRS)
def test_an_error_is_relative_to_the_norm_in_float32(reference, other, error):
  errors, compute_effects = measure([reference], [other])
  assert errors.array_errors[0] == pytest.approx(error)
  assert compute_effects(NO_NOISE)[0] == pytest.approx(error)
  assert errors.is_finite
  assert errors.is_zero == (not np.any(reference))


def test_an_error_in_float64_does_not_leave_its_range():
  with jax.enable_x64(True):
    for size in 1e-150, 1e150:
      errors, _ = measure([[3 * size, 4 * size]], [[3 * size, 4.5 * size]])
      assert errors.array_errors[0] == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [[NAN, 1.0], [INF, -INF]])
def test_nothing_is_compared_with_an_array_that_is_not_finite(bad):
  errors, _ = measure([floats(1, 2), floats(*bad)], [floats(1, 2)] * 2)
  assert not errors.is_finite


def test_entries_that_are_zero_only_in_half_precision_are_counted():
  reference, other = [[1, 2, 0], [3, 4]], [[1, 0, 0], [0, 4]]
  errors, _ = measure([floats(*x) for x in reference], map(np.float32, other))
  assert errors.underflow_fraction == 2 / 5


def test_the_error_of_a_result_is_that_of_its_arrays_together():
  reference = [floats(300), floats(400), floats(3, 4)]
  other = [floats(300), floats(450), floats(3, 4.1)]
  _, compute_effects = measure(reference, other, groups=[0, 0, 1])
  effects = compute_effects(NO_NOISE)
  np.testing.assert_allclose(effects, [0.1, 0, 0.125, 0.02], rtol=1e-5)
  # The worst result counts.
  _, compute_effects = measure(reference[::-1], other[::-1], groups=[0, 1, 1])
  assert compute_effects(NO_NOISE)[0] == pytest.approx(0.1)


def test_layers_are_not_to_blame_for_noise_or_for_an_array_of_zeros():
  reference = [floats(3, 4), floats(1), floats(0)]
  other = [floats(3, 4.5), floats(2), floats(1)]
  _, compute_effects = measure(reference, other)
  noise = np.array([False, True, False])
  effects = compute_effects(noise)
  # The norm of the zeros counts in the error of all arrays together.
  total = math.sqrt(0.5**2 + 1) / 5
  np.testing.assert_allclose(effects, [total, 0.1, 0, 0], rtol=1e-6)
  # An infinite error is no noise.
  _, compute_effects = measure([floats(1)], [floats(INF)])
  assert compute_effects(np.array([True])).tolist() == [INF, INF]


def test_state_next_to_gradients_is_judged_by_itself():
  kinds = "grads", "result", "result"
  outputs = [
    _outputs.Output(kind, name, 0, depends_on_gradients=name == "p")
    for kind, name in zip(kinds, ("w", "mean", "p"), strict=True)
  ]
  reference = [floats(1), floats(2), floats(3)]
  comparison = _errors.OutputComparison(outputs, reference)
  assert comparison.names == ["w", "result mean"]
  errors = comparison.compute_errors([floats(1), floats(3), floats(9)])
  effects = comparison.compute_effects(errors, NO_NOISE)
  assert effects.tolist() == pytest.approx([0, 0, 0.5])
