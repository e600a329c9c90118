"""The numbers by which reports judge: limits of errors, scales, iterations."""

import functools
import math

from helpers import train_steps
from helpers.comparisons import make_layer
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.diagnostics import (
  _scaling_mistakes,
  _step_runs,
  _tracing,
)
from optax_lossscale.diagnostics._precision import (
  _limits,
  _reference_program,
)

EPS = 2.0**-10
# The first error is of all arrays together, the second of a single array.
TOTAL, ARRAY = 0, 1


def make_errors(index, error):
  errors = np.zeros(2)
  errors[index] = error
  return errors


find_possible_outliers = functools.partial(
  _limits.find_large_errors, total_eps=_limits.OUTLIER_EPS
)


@pytest.mark.parametrize(
  "is_large, index, limit",
  [
    (_limits.find_large_errors, TOTAL, 32),
    (_limits.find_large_errors, ARRAY, 64),
    (find_possible_outliers, TOTAL, 16),
    (find_possible_outliers, ARRAY, 64),
  ],
)
def test_an_error_is_large_above_its_limit(is_large, index, limit):
  at_limit, above = limit * EPS, np.nextafter(limit * EPS, 1)
  assert not is_large(make_errors(index, at_limit), EPS).any()
  assert np.flatnonzero(is_large(make_errors(index, above), EPS)) == [index]


@pytest.mark.parametrize("index, limit", [(TOTAL, 16), (ARRAY, 64)])
def test_a_layer_is_an_outlier_above_the_limit_of_its_effect(index, limit):
  for error, outliers in (
    (limit * EPS, ()),
    (np.nextafter(limit * EPS, 1), ("bad",)),
  ):
    effects = np.stack([np.zeros(2), make_errors(index, error)])
    assert _limits.find_outliers(["good", "bad"], effects, EPS) == outliers


@pytest.mark.parametrize(
  "effects, outliers",
  [
    # The effects of the other layers add up in squares: 0.3 and 0.4 make 0.5.
    ([2.0, 0.3, 0.4], ""),
    ([2.01, 0.3, 0.4], "a"),
    # At most half of the layers are outliers, but always one.
    ([1.0, 1.0, 0.1, 0.1], "ab"),
    ([1.0, 1.0, 0.1], ""),
    ([1.0], "a"),
    # A layer that makes the result nonfinite is an outlier in any case.
    ([math.inf, math.inf, 0.1], "ab"),
    # The passes of a layer count together, and the worst layer is first.
    ([0.1, 3.0, 0.1, 5.0], "db"),
  ],
)
def test_outliers_stand_out_by_a_factor_of_four(effects, outliers):
  names = "abcd"[: len(effects)]
  columns = np.repeat(np.reshape(effects, (-1, 1)), 2, axis=1)
  assert _limits.find_outliers(names, columns, EPS) == tuple(outliers)


def find_increase(excess_by_increase):
  """Return the suggested log2 increase of the loss scale.

  For some increases, the largest error is given in units of its limit.
  """
  increases = sorted(excess_by_increase)

  def measure_at(log2_increase):
    # An increase that isn't listed has the error of the last one before it.
    i = max(x for x in increases if x <= log2_increase)
    return make_errors(ARRAY, 64 * EPS * excess_by_increase[i])

  return _limits.find_log2_increase(measure_at(0), measure_at, EPS)


@pytest.mark.parametrize(
  "excess_by_increase, increase",
  [
    *(({0: 9.0, i: 0.5}, i) for i in (4, 8, 12, 16, 20, 24)),
    # An error at its limit is as good as a smaller one.
    ({0: 9.0, 4: 1.0, 8: 0.1}, 4),
    # An increase that is good to within a tenth is enough.
    ({0: 9.0, 4: 1.09, 8: 1.0}, 4),
    ({0: 9.0, 4: 1.11, 8: 1.0}, 8),
    # An error that does not halve is no underflow.
    ({0: 1.99, 4: 0.5}, 0),
    ({0: 2.0, 4: 0.5}, 4),
    ({0: 9.0, 4: 4.6}, 0),
    ({0: 9.0, 4: 4.5}, 4),
    # A scale with which gradients overflow ends the search.
    ({0: 9.0, 4: 3.0, 8: math.inf, 12: 0.5}, 4),
    ({0: 9.0, 4: math.inf}, 0),
  ],
)
def test_the_suggested_increase_of_the_scale_is_the_smallest_that_is_enough(
  excess_by_increase, increase
):
  assert find_increase(excess_by_increase) == increase


@pytest.mark.parametrize(
  "headrooms, excess",
  [
    ([3.0, 0.0], 0),
    ([], 0),
    ([0.0], 0),
    ([-0.1, 5.0], 1),
    ([-3.0], 3),
    ([-3.1, -1.0], 4),
    ([math.inf], 0),
  ],
)
def test_the_suggested_decrease_of_the_scale_covers_the_worst_backward_pass(
  headrooms, excess
):
  rows = [make_layer("a", headroom=x, backward=True) for x in headrooms]
  causes = find_causes(rows, [math.inf] * len(rows), error=math.inf)
  assert causes.log2_scale_change == -excess


AT_NOISE = 0.05
# Operands change by this, so that an error above 0.05 is noise.
PERTURBATION = _reference_program.PERTURBATION


@pytest.mark.parametrize(
  "error, perturbed_error, is_noise, is_expected",
  [
    # Rounding to half of the spacing may cause up to four times this error.
    (0.5, 0.5 / (2 * EPS) * PERTURBATION, False, True),
    (np.nextafter(0.5, 1), 0.5 / (2 * EPS) * PERTURBATION, False, False),
    # A small error needs no excuse.
    (np.nextafter(64 * EPS, 1), 0.04, False, True),
    (64 * EPS, 0.04, False, False),
    # Noise is not judged, however large the error is.
    (9.0, AT_NOISE, False, True),
    (9.0, np.nextafter(AT_NOISE, 1), True, False),
    (1e9, 1.0, True, False),
    (math.inf, 0.04, False, False),
  ],
)
def test_an_error_is_expected_up_to_four_amplified_roundings(
  error, perturbed_error, is_noise, is_expected
):
  amplification = perturbed_error / PERTURBATION
  args = map(np.array, ([error], [perturbed_error], [amplification]))
  noise, expected = _limits.find_expected_errors(*args, EPS)
  assert (noise.tolist(), expected.tolist()) == ([is_noise], [is_expected])


def test_it_is_asked_whether_an_error_above_that_of_noise_is_expected():
  assert not _limits.may_be_expected(np.array([0.0, AT_NOISE]))
  assert _limits.may_be_expected(np.array([0.0, np.nextafter(AT_NOISE, 1)]))


def find_causes(rows, effects, error=None, **kwargs):
  """Return the causes if each layer has this effect on all arrays.

  The error as trained is by default that of the worst layer.
  """
  error = max(effects, default=math.inf) if error is None else error
  columns = [np.array([x, x]) for x in effects]
  return _limits.find_causes(
    rows, columns, np.array([error, error]), EPS, **kwargs
  )


def test_layers_are_sorted_by_their_effect_and_their_numbers():
  rows = [make_layer(name, index=i) for i, name in enumerate("abc")]
  rows[2] = rows[2]._replace(amax=2.0)
  causes = find_causes(rows, [0.1, 1.0, 1.0])
  assert [row.name for row in causes.layers] == ["c", "b", "a"]
  assert [row.isolated_error for row in causes.layers] == [1.0, 1.0, 0.1]
  assert causes.outliers == causes.overflowing == ()
  assert find_causes(rows, [9.0, 1.0, 1.0]).outliers == ("a",)


def test_a_layer_overflows_if_it_does_so_forward_with_a_large_effect():
  rows = [
    make_layer("a", headroom=-1.0, index=0),
    make_layer("b", headroom=-3.0, index=1),
    make_layer("b", headroom=-2.0, index=2),
    make_layer("", headroom=-2.0, index=3),
    make_layer("harmless", headroom=-4.0, index=4),
    make_layer("backward", headroom=-5.0, index=5, backward=True),
    make_layer("small", headroom=1.0, index=6),
  ]
  effects = [math.inf] * 4 + [0.0] + [math.inf] * 2
  causes = find_causes(rows, effects)
  assert causes.overflowing == ("b", "a")
  assert causes.log2_scale_change == 0
  assert set(causes.outliers) == {"a", "b", "backward", "small"}


def test_a_lower_scale_is_suggested_if_only_the_backward_pass_overflows():
  rows = [
    make_layer("a", headroom=-3.0, index=0, backward=True),
    make_layer("b", headroom=-9.0, index=1),
  ]
  causes = find_causes(rows, [math.inf, 0.0])
  assert causes.log2_scale_change == -3
  assert causes.overflowing == causes.outliers == ()
  # A loss scale that was tried has the last word.
  causes = find_causes(rows, [math.inf, 0.0], log2_scale_change=-1)
  assert causes.log2_scale_change == -1
  assert causes.overflowing == causes.outliers == ()
  causes = find_causes(rows, [1.0, 0.0])
  assert causes.log2_scale_change == 0
  assert causes.outliers == ("a",)
  assert find_causes([], []).log2_scale_change == 0


# The effects without the array that is amplified, and without the outliers.
SMALL, LARGE = np.zeros(2), make_errors(ARRAY, 1.0)


@pytest.mark.parametrize(
  "fields, without_array, without_outliers, is_amplified",
  [
    ({}, SMALL, LARGE, True),
    ({}, LARGE, LARGE, True),
    # An outlier is to blame if the errors are small without it, or if others
    # are large without the array.
    ({"outliers": ("w",)}, SMALL, LARGE, True),
    ({"outliers": ("w",)}, SMALL, SMALL, False),
    ({"outliers": ("w",)}, LARGE, LARGE, False),
    ({"overflowing": ("w",)}, SMALL, SMALL, False),
    ({"log2_scale_change": 4}, SMALL, SMALL, False),
  ],
)
def test_an_error_that_any_rounding_causes_is_excused_without_an_outlier(
  fields, without_array, without_outliers, is_amplified
):
  causes = _limits.Causes(**fields)
  measure_without = lambda names: without_outliers
  args = causes, without_array, measure_without, EPS
  assert _limits.is_amplified(*args) is is_amplified


def test_the_suggested_decrease_of_the_scale_is_the_smallest_that_is_enough():
  find = lambda n: _step_runs.find_log2_decrease(lambda x: x >= n)
  assert list(map(find, range(1, 65))) == [*range(1, 65)]
  assert find(65) is None


X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def test_an_overflow_that_is_clipped_before_update_is_an_infinite_error():
  """The clipped gradients are finite, and near those in float32."""
  step, args = train_steps.make_step(
    train_steps.map_grads(lambda g: jnp.clip(g, -1e-3, 1e-3)),
    loss_fn=ols.autocast(lambda w, x: jnp.sum((x @ w) ** 2)),
    tx=train_steps.make_tx(policy=2.0**20),
    params=np.eye(4, dtype=np.float32),
    batch=X,
  )
  report = diagnostics.compare_precision(step, *args, progress=False)
  assert report.error == math.inf and not report.is_accurate
  largest = 2.0**20 * np.max(np.abs(X.T @ (2 * X)))
  excess = math.ceil(np.log2(largest / 65504))
  assert report.suggested_log2_scale_change == -excess


def check_invariance(make_factor, is_exact=True):
  """Return the problems of gradients that have a factor at another scale.

  Args:
    make_factor: a function of the ratio of the loss scale and the traced one.
    is_exact: whether the gradient is computed without half precision.
  """
  step, args = train_steps.make_step(
    loss_fn=lambda w, batch: jnp.sum(w**2), params=np.ones(4, np.float32)
  )
  traced = _tracing.trace("test", step, args, {}, allow_abstract=True)
  grad_index = [output.kind for output in traced.outputs].index("grads")
  (scale_index,) = traced.scale_indices
  scale = np.float32(traced.inputs[scale_index])
  grads = np.arange(1, 5, dtype=np.float32)

  def run_step(inputs):
    factor = make_factor(float(inputs[scale_index] / scale))
    return {grad_index: np.float32(factor * grads)}

  return _scaling_mistakes.ScaleRuns(
    traced, {grad_index: 1.0}, run_step, {grad_index: grads}, is_exact=is_exact
  ).check_invariance()


@pytest.mark.parametrize(
  "power, excess, is_exact, cause",
  [
    # The exact tolerance.
    (0, 0.9e-3, True, ""),
    (0, 1.1e-3, True, "depend on the loss scale"),
    (0, 1.1e-3, False, ""),
    # The tolerance of a power of two.
    (1, 0.049, True, "were never unscaled"),
    (1, 0.051, True, "depend on the loss scale"),
    (1, 0.051, False, ""),
    (-1, 0.049, True, "unscaled twice"),
    (-1, 0.051, False, ""),
  ],
)
def test_a_gradient_depends_on_the_scale_above_a_tolerance(
  power, excess, is_exact, cause
):
  problems = check_invariance(
    lambda ratio: 1 if ratio == 1 else ratio**power * (1 + excess), is_exact
  )
  assert [cause in problem.cause for problem in problems] == [True] * bool(
    cause
  )


@pytest.mark.parametrize("noise, is_judged", [(0.9e-3, True), (1.1e-3, False)])
def test_a_gradient_that_differs_between_equal_runs_is_not_judged(
  noise, is_judged
):
  problems = check_invariance(lambda ratio: ratio * (1 + noise))
  assert bool(problems) is is_judged


@pytest.mark.parametrize(
  "error, fraction, headroom, log2_scale",
  [
    (np.nextafter(16 * EPS, 1), 0.26, 12.5, 10),
    (16 * EPS, 0.26, 12.5, 0),
    (np.nextafter(16 * EPS, 1), 0.25, 12.5, 0),
    (1.0, 1.0, 0.5, 0),
  ],
)
def test_a_loss_scale_is_suggested_if_an_error_is_due_to_small_numbers(
  error, fraction, headroom, log2_scale
):
  rows = [
    make_layer("a", headroom=20.5, backward=True),
    make_layer("b", headroom=headroom, backward=True),
  ]
  rows[0] = rows[0]._replace(underflow_fraction=fraction)
  find = functools.partial(find_causes, rows, [error, 0.0])
  assert find(error=1.0).log2_scale_change == log2_scale
  # Without a large error, or if another one was tried, none is suggested.
  assert find(error=0.0).log2_scale_change == 0
  assert find(error=1.0, tried_scales=True).log2_scale_change == 0
