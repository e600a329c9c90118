"""`compare_precision` judges each array separately, and ignores rounding."""

import dataclasses
import functools

from helpers import mark_slow_params
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (64, 16))
Y = jax.random.normal(KEYS[1], (64, 4))
ONE = ols.FixedLossScale(1.0).init()


def normal(i, *shape):
  return jax.random.normal(KEYS[i], shape) / shape[0] ** 0.5


def compare(loss, params, state=ONE, **kwargs):
  def fun(params, state):
    return ols.grad(ols.autocast(loss), state)(params)

  args = params, state
  return diagnostics.compare_precision(fun, *args, progress=False, **kwargs)


PARAMS = {"big": normal(2, 16, 32), "small": normal(3, 16, 32)}
PARAMS |= {"out": normal(4, 32, 4)}


def flushed(p):
  hidden = jnp.tanh(X @ p["big"]) + 1e-7 * jnp.tanh(X @ p["small"])
  return jnp.mean((hidden @ p["out"] - Y) ** 2)


def cancelled(p):
  """Half precision loses most of a gradient behind a factor of 1e-5."""
  far = 300 + jnp.tanh(X @ p["small"])
  hidden = jnp.tanh(X @ p["big"]) + 1e-5 * jnp.tanh(
    far @ p["lost"] - 300 * jnp.sum(p["lost"], 0)
  )
  return jnp.mean((hidden @ p["out"] - Y) ** 2)


def test_a_small_gradient_that_underflows_is_an_outlier():
  report = compare(flushed, PARAMS)
  assert report.error < 1e-3 and report.outliers == ("small",)
  assert report.inaccurate_arrays == ("small",)
  assert report.array_errors["small"] > 0.5
  change = report.suggested_log2_scale_change
  assert change >= 4
  text = str(report)
  assert text.splitlines()[0] == (
    "small underflows in the backward pass: raise the loss scale by"
    f" 2**{change}."
  )
  assert "Outlier: keep_float32='small'.\n" in text
  assert "Largest relative errors:\n  small: " in text
  scale = ols.FixedLossScale(2.0**report.suggested_log2_scale_change).init()
  cured = compare(flushed, PARAMS, scale)
  assert (
    cured.inaccurate_arrays == cured.outliers == ()
    and cured.suggested_log2_scale_change == 0
  )
  assert cured.as_dict()["inaccurate_arrays"] == []


@pytest.mark.slow
def test_a_small_gradient_that_cancels_is_an_outlier():
  params = PARAMS | {"lost": normal(5, 32, 32)}
  scale = ols.FixedLossScale(2.0**15).init()
  report = compare(cancelled, params, scale)
  assert report.error < 1e-3 and report.outliers[0] == "lost"
  assert {*report.inaccurate_arrays} <= {"lost", "small"}
  assert report.inaccurate_arrays and report.suggested_log2_scale_change == 0
  first = str(report).splitlines()[0]
  outliers = list(report.outliers)
  assert first in (
    "Outlier: keep_float32='lost'.",
    f"{len(outliers)} outliers: keep_float32={outliers}.",
  )


def attention(p):
  x = X.reshape(8, 8, 16)
  q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
  weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / 4)
  return jnp.mean(((weights @ v).reshape(64, 16) @ p["out"] - Y) ** 2)


def normed(p):
  h = X @ p["w"] + p["bias"]
  h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
  return jnp.mean((jnp.tanh(h) @ p["out"] - Y) ** 2)


@pytest.mark.parametrize(
  "loss", mark_slow_params([normed], [attention, normed])
)
def test_a_gradient_that_is_zero_except_for_rounding_is_ignored(loss):
  params = {name: normal(i, 16, 16) for i, name in enumerate("qkvw")}
  params |= {"bias": normal(5, 16), "out": normal(6, 16, 4)}
  used = {"attention": "qkv", "normed": "w"}[loss.__name__]
  params = {k: x for k, x in params.items() if k in (*used, "bias", "out")}
  report = compare(loss, params, ols.FixedLossScale(2.0**6).init())
  assert report.noise_only_arrays == ("bias",)
  assert report.array_errors["bias"] > 0.5
  assert report.inaccurate_arrays == report.outliers == ()
  text = str(report)
  assert text.startswith("No single layer dominates the error, which is small.")
  before, after = text.split("Only rounding noise in float32, too, so")
  assert "bias" not in before
  assert after.startswith(" no layer is to blame: bias.\n")


def difference(w):
  """Subtract a matmul from itself, summed in another order."""
  return X @ w - jnp.sum(X[:, ::-1, None] * w[::-1], 1)


@pytest.mark.slow
def test_no_layer_is_blamed_for_errors_that_float32_has_too():
  compare_fun = functools.partial(diagnostics.compare_precision, progress=False)
  report = compare_fun(ols.autocast(difference), normal(2, 16, 16))
  assert report.error == 0 and report.noise_only_arrays == ("",)
  assert report.outliers == report.inaccurate_arrays == ()
  assert [row.isolated_error for row in report.layers] == [0]
  assert "too, so no layer is to blame: the result.\n" in str(report)

  both = ols.autocast(lambda w: {"sound": X @ w, "noise": 1e9 * difference(w)})
  report = compare_fun(both, normal(2, 16, 16))
  assert report.error < 1e-3 and report.noise_only_arrays == ("noise",)
  assert all(row.isolated_error < 1e-3 for row in report.layers)

  many = ols.autocast(lambda ws: list(map(difference, ws)))
  report = compare_fun(many, [normal(i, 16, 16) for i in range(5)])
  assert "is to blame: 0, 1, 2 and 2 more.\n" in str(report)


@pytest.mark.slow
def test_an_inaccurate_array_without_an_outlier_is_reported():
  """Each of many layers adds a little."""

  def deep(p):
    x = X
    for w in p["layers"]:
      x = jnp.sin(3 * x @ w)
    return jnp.mean((x @ p["out"]) ** 2)

  layers = [normal(i, 16, 16) for i in range(8)]
  report = compare(deep, {"layers": layers, "out": normal(6, 16, 4)})
  names = report.amplified_arrays
  assert len(names) > 3 and report.inaccurate_arrays == ()
  assert "The function amplifies any rounding, so these errors" in str(report)
  other = dataclasses.replace(
    report, amplified_arrays=(), inaccurate_arrays=names, is_accurate=False
  )
  text = str(other)
  more = len(names) - 3
  assert f"  (+{more} more: report.inaccurate_arrays)\n" in text
  assert text.startswith("The error is large, and no single layer dominates")


def test_a_gradient_that_is_zero_in_float32_names_no_layer():
  """It is rounded to something else in half precision."""
  nearly_one = (1 + 2.0**-12) * jnp.eye(4)

  def loss(p):
    noise = p["x"] @ nearly_one - p["x"] * (1 + 2.0**-12)
    return jnp.sum(p["w"] * noise) + jnp.sum(jnp.sin(p["x"] @ nearly_one))

  report = compare(loss, {"w": jnp.ones((4, 4)), "x": jnp.ones((4, 4))})
  assert report.outliers == ()


def of_policy(policy):
  block = jax.checkpoint(lambda x, w: jnp.cos(x @ w), policy=policy)
  return lambda w: jnp.mean(block(block(X, w), w))


POLICIES = {
  "plain": None,
  "dots_saveable": jax.checkpoint_policies.dots_saveable,
  "save_only_these_names": (
    jax.checkpoint_policies.save_only_these_names("hidden")
  ),
  "save_anything_except": (
    jax.checkpoint_policies.save_anything_except_these_names("other")
  ),
  "both": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("hidden"),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_error_with_a_checkpoint_policy_is_the_error_of_the_gradient(name):
  """Values that JAX rounds are not roundings of the user."""
  w = 20 * normal(2, 16, 16)
  loss = of_policy(POLICIES[name])
  half = jax.jit(jax.grad(ols.autocast(loss)))(w)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(jax.grad(loss))(w)
  real = np.linalg.norm(half - exact) / np.linalg.norm(exact)
  fun = jax.grad(ols.autocast(loss))
  report = diagnostics.compare_precision(fun, w, progress=False)
  assert real > 0.01
  assert report.error == pytest.approx(real, rel=0.05)


def test_values_that_the_user_rounds_stay_rounded():
  coarse = functools.partial(
    lax.reduce_precision, exponent_bits=5, mantissa_bits=2
  )

  def fun(w):
    half = coarse((X @ w).astype(jnp.float16))
    return half.astype(jnp.float32) @ w

  w = normal(2, 16, 16)
  report = diagnostics.compare_precision(ols.autocast(fun), w, progress=False)
  # Rounded to two bits in both: else they would be far apart.
  assert report.error < 0.05


def in_a_branch(fun):
  zeros = lambda *args: jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, *args))
  return lambda x, w: lax.cond(x[0, 0] < 100, fun, zeros, x, w)


@pytest.mark.parametrize(
  "wrap", mark_slow_params([jax.jit], [jax.jit, in_a_branch])
)
def test_an_unused_matmul_has_no_row(wrap):
  @wrap
  def both(x, w):
    unread = jnp.sin(x) @ w
    return x @ w, unread

  fun = ols.autocast(lambda w: jnp.sum(both(X, w)[0]))
  w = normal(2, 16, 16)
  report = diagnostics.compare_precision(fun, w, progress=False)
  assert len(report.layers) == 1
  assert diagnostics.precision_report(fun, w).total_flops == 2 * 64 * 16 * 16


def test_integers_count_by_their_bits():
  def fun(w):
    return (w @ w).astype(jnp.float32)

  for dtype, share in (jnp.int32, 0), (jnp.int8, 1), (jnp.float16, 1):
    report = diagnostics.precision_report(fun, jnp.ones((4, 4), dtype))
    assert report.fraction == share


def test_array_names_are_accepted_by_keep_float32():
  params = {"blocks": [{"up": normal(2, 16, 32)}], "head": normal(4, 32, 4)}

  def loss(p):
    return jnp.mean((jnp.tanh(X @ p["blocks"][0]["up"]) @ p["head"] - Y) ** 2)

  report = compare(loss, params)
  assert list(report.array_errors) == ["blocks/0/up", "head"]
  for name in report.array_errors:
    kept = ols.grad(ols.autocast(loss, keep_float32=name), ONE)
    (row,) = {
      row.param_path
      for row in diagnostics.precision_report(kept, params).unconverted
    }
    assert row == name


def test_two_keys_with_a_slash_are_distinguished_by_quotes():
  params = {"a/b": normal(2, 16, 16), "a": {"b": normal(3, 16, 16)}}

  def loss(p):
    return jnp.mean(jnp.sin(X @ p["a/b"]) @ p["a"]["b"])

  names = ["a/b", "'a/b'"]
  report = compare(loss, params)
  assert list(report.array_errors) == names
  assert {row.name for row in report.layers} == {*names}
  gradients = diagnostics.gradient_report(params).as_dict()["leaves"]
  assert list(gradients) == names
  for name in names:
    kept = ols.grad(ols.autocast(loss, keep_float32=name), ONE)
    rows = diagnostics.precision_report(kept, params).unconverted
    assert {row.param_path for row in rows} == {name}
  # If nothing is spelled alike, a key is printed unchanged.
  alone = {"a/b": params["a/b"], "a": {"c": params["a"]["b"]}}
  assert list(diagnostics.gradient_report(alone).as_dict()["leaves"]) == [
    "a/c",
    "a/b",
  ]
