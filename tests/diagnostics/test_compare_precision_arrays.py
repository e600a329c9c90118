"""`compare_precision` judges each array separately, and ignores rounding."""

import functools

from helpers import parametrize_slow
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

X = normal(64, 16, seed=0) * 4
Y = normal(64, 4, seed=1) * 2
W = normal(16, 16, seed=2)
ONE = ols.FixedLossScale(1.0).init()


compare_fun = functools.partial(diagnostics.compare_precision, progress=False)


def compare(loss, params, state=ONE):
  fun = lambda params, state: ols.grad(ols.autocast(loss), state)(params)
  return compare_fun(fun, params, state)


PARAMS = {"small": normal(16, 4, seed=3), "out": normal(16, 4, seed=4)}


def flushed(p):
  return jnp.mean((X @ p["out"] + 1e-7 * (X @ p["small"]) - Y) ** 2)


def test_a_small_gradient_that_underflows_is_an_outlier():
  report = compare(flushed, PARAMS)
  assert report.error < 1e-3 and report.outliers == ("small",)
  assert report.inaccurate_arrays == ("small",)
  assert report.array_errors["small"] > 0.5
  assert report.suggested_log2_scale_change >= 4


@pytest.mark.slow
def test_the_suggested_loss_scale_repairs_a_gradient_that_underflows():
  change = compare(flushed, PARAMS).suggested_log2_scale_change
  cured = compare(flushed, PARAMS, ols.FixedLossScale(2.0**change).init())
  assert cured.inaccurate_arrays == cured.outliers == ()
  assert cured.suggested_log2_scale_change == 0


def centered(p):
  h = X @ p["w"] + p["bias"]
  return jnp.mean((h - h.mean(0) - X) ** 2)


def test_a_gradient_that_is_zero_except_for_rounding_is_ignored():
  params = {"w": W, "bias": normal(16, seed=5)}
  report = compare(centered, params, ols.FixedLossScale(2.0**6).init())
  assert report.ill_conditioned_arrays == ("bias",)
  assert report.array_errors["bias"] > 0.5
  assert report.inaccurate_arrays == report.outliers == ()
  assert report.is_accurate


def difference(w):
  """Subtract a matmul from itself, summed in another order."""
  return X @ w - jnp.sum(X[:, ::-1, None] * w[::-1], 1)


@pytest.mark.slow
def test_no_layer_is_blamed_for_errors_that_float32_has_too():
  report = compare_fun(ols.autocast(difference), W)
  assert report.error == 0 and report.ill_conditioned_arrays == ("",)
  assert report.outliers == report.inaccurate_arrays == ()
  assert [row.isolated_error for row in report.layers] == [0]

  both = ols.autocast(lambda w: {"sound": X @ w, "noise": 1e9 * difference(w)})
  report = compare_fun(both, W)
  assert report.error < 1e-3 and report.ill_conditioned_arrays == ("noise",)
  assert all(row.isolated_error < 1e-3 for row in report.layers)


def test_values_that_the_user_rounds_stay_rounded():
  def fun(w):
    half = lax.reduce_precision((X @ w).astype(jnp.float16), 5, 2)
    return half.astype(jnp.float32) @ w

  report = compare_fun(ols.autocast(fun), W)
  # Rounded to two bits in both: else they would be far apart.
  assert report.error < 0.05


def in_a_branch(fun):
  zeros = lambda *args: jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, *args))
  return lambda x, w: lax.cond(x[0, 0] < 100, fun, zeros, x, w)


@parametrize_slow("wrap", [jax.jit], [jax.jit, in_a_branch])
def test_an_unused_matmul_has_no_row(wrap):
  @wrap
  def both(x, w):
    unread = jnp.sin(x) @ w
    return x @ w, unread

  fun = ols.autocast(lambda w: jnp.sum(both(X, w)[0]))
  report = compare_fun(fun, W)
  assert len(report.layers) == 1
  assert diagnostics.count_flops(fun, W).total_flops == 2 * 64 * 16 * 16


def test_array_names_are_accepted_by_keep_float32():
  """Two keys with a slash are distinguished by quotes."""
  params = {"a/b": W, "a": {"b": W + 1}, "blocks": [{"up": W - 1}]}

  def loss(p):
    return jnp.mean(X @ p["a/b"] + X @ p["a"]["b"] + X @ p["blocks"][0]["up"])

  names = ["a/b", "'a/b'", "blocks/0/up"]
  report = compare(loss, params)
  assert list(report.array_errors) == names
  assert {row.name for row in report.layers} == {*names}
  nans = jax.tree.map(lambda x: x * jnp.nan, params)
  assert [x.name for x in diagnostics.nonfinite_leaves(nans)] == names
  for name in names:
    kept = ols.grad(ols.autocast(loss, keep_float32=name), ONE)
    rows = diagnostics.count_flops(kept, params).unconverted
    assert {row.param_path for row in rows} == {name}


def test_a_key_with_a_slash_is_unchanged_if_no_path_is_spelled_alike():
  leaves = diagnostics.nonfinite_leaves({"a/b": jnp.nan, "a": {"c": jnp.nan}})
  assert [x.name for x in leaves] == ["a/c", "a/b"]
