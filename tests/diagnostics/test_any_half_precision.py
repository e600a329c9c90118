"""The reports judge half precision, whatever makes a program compute in it."""

import itertools

from helpers import find_line_number, train_steps
from helpers.planted_layers import normal
import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import diagnostics
from optax_lossscale.diagnostics._precision import _layers

SIZE = 16
KEY = jax.random.key(0)
X = normal(8, SIZE) * 8**0.5
DTYPES = [jnp.float16, jnp.bfloat16]


def init_params(*names):
  return {x: normal(SIZE, SIZE, seed=i) for i, x in enumerate(names, 1)}


def check(loss_fn, params, loss_scale=2.0**10):
  """Return the report on a step that differentiates a loss."""
  step, args = train_steps.make_step(
    loss_fn=loss_fn,
    tx=train_steps.make_tx(policy=loss_scale),
    params=params,
    batch=X,
  )
  return diagnostics.check_step(step, *args, progress=False)


def norm_by_squares(w, x):
  x = 500 * x
  mean_square = jnp.mean(x * x, -1, keepdims=True)  # norm_by_squares
  return x * lax.rsqrt(mean_square + 1)


def variance(w, x, shift=60):
  x = x + shift
  mean = jnp.mean(x, -1, keepdims=True)
  square = jnp.mean(x * x, -1, keepdims=True) - mean * mean  # variance
  return (x - mean) * lax.rsqrt(jnp.abs(square) + 2.0**-7)


def softmax_by_hand(w, x):
  exps = jnp.exp(15 * x)  # softmax_by_hand
  return exps / exps.sum(-1, keepdims=True)


def infinite_count(w, x):
  count = jnp.sum(jnp.ones(70_000, bool)).astype(x.dtype)  # infinite_count
  return 128 * x * 512 / count


def swallowed_sum(w, x, start=4096):
  starts = jnp.full((8, 1), start, x.dtype)
  sums = jnp.cumsum(jnp.concatenate([starts, x, x], 1), -1)  # swallowed_sum
  return x * jnp.tanh(sums[:, -1:] - start)


def embedding(w, x):
  rows = w[jnp.zeros(6000, int)]  # embedding
  return x + x * rows.sum(0) / 8192


def attention(w, x):
  scores = (3000 * x) @ (300 * x).T  # attention
  scores = jnp.where(jnp.isfinite(scores), scores, 0)
  return jax.nn.softmax(scores / 1024 / 1024) @ x


# The operations that lose precision in bfloat16, and those in float16 alone.
IN_BOTH = variance, swallowed_sum, embedding
IN_FLOAT16 = norm_by_squares, softmax_by_hand, infinite_count, attention


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fun", "dtype"),
  [
    *itertools.product(IN_BOTH, DTYPES),
    *itertools.product(IN_FLOAT16, DTYPES[:1]),
  ],
)
def test_an_operation_that_loses_precision_is_named_at_its_line(fun, dtype):
  params = init_params("first", "middle", "last")

  def loss_fn(params, x):
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    h = jnp.tanh(x.astype(dtype) @ params["first"])
    h = jnp.tanh(fun(params["middle"], h) @ params["last"])
    return jnp.mean((h.astype(jnp.float32) - X) ** 2)

  report = check(loss_fn, params, loss_scale=16.0)
  first = report.problems[0]
  line = find_line_number(fun.__name__, __file__)
  assert f"test_any_half_precision.py:{line}" in first.cause
  assert "x.astype(jnp.float32)" in first.fix or "subtract" in first.fix
  assert first.keep_float32 == ()


@pytest.mark.slow
def test_state_that_is_no_parameter_is_compared_too():
  """A running variance by difference does not reach the gradients."""

  def update_variance(old, new, variance):
    w = old[0]["w"].astype(jnp.float16)
    h = X.astype(jnp.float16) @ w + 60
    batch_variance = jnp.mean(h * h, 0) - jnp.mean(h, 0) ** 2  # state
    variance = 0.9 * variance + 0.1 * batch_variance.astype(jnp.float32)
    return *new, variance

  step, args = train_steps.make_step(
    make_result=update_variance,
    params=init_params("w"),
    batch=X,
    extra=(jnp.ones(SIZE),),
  )
  report = diagnostics.check_step(step, *args, progress=False)
  line = find_line_number("state", __file__)
  assert f"test_any_half_precision.py:{line}" in report.problems[0].cause
  assert report.comparison.inaccurate_arrays == ("result 2",)


@pytest.mark.slow
def test_a_step_that_amplifies_any_rounding_is_not_blamed_for_its_dtype():
  """A chaotic iteration: a change by 2**-20 in float32 changes the result."""

  def loss_fn(params, x):
    w, h = params["w"].astype(jnp.float16), x.astype(jnp.float16)
    for _ in range(8):
      h = jnp.sin(3 * (h @ w))
    return jnp.mean((h.astype(jnp.float32) - 1) ** 2)

  report = check(loss_fn, init_params("w"), loss_scale=1.0)
  assert report.is_sound, str(report)
  assert any(
    "the step amplifies any rounding, so" in x for x in report.not_checked
  )


def bitcast(x):
  bits = lax.bitcast_convert_type(x, jnp.uint16)
  return lax.bitcast_convert_type(bits & np.uint16(0xFFF0), x.dtype)


def callback(x):
  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.pure_callback(lambda x: np.sin(np.asarray(x)), shape, x)


def pallas_kernel(x):
  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] + 1

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


@pytest.mark.parametrize(
  ("fun", "name"),
  [
    (lambda x: jnp.nextafter(x, jnp.ones((), x.dtype)), "nextafter"),
    pytest.param(bitcast, "bitcast_convert_type", marks=pytest.mark.slow),
    pytest.param(callback, "pure_callback", marks=pytest.mark.slow),
    pytest.param(pallas_kernel, "pallas_call", marks=pytest.mark.slow),
  ],
)
def test_an_operation_without_a_float32_version_runs_as_written(fun, name):
  apply = lambda x: jnp.tanh(fun(x.astype(jnp.float16))).astype(jnp.float32)
  report = diagnostics.compare_precision(apply, X, progress=False)
  (note,) = report.limitations
  assert note.startswith(f"Not analyzed: {name} at test_any_half_precision.py")
  assert note.endswith("which runs in half precision in every run.")
  expected = np.tanh(np.float32(jax.jit(fun)(np.float16(X))))
  actual = jax.jit(apply)(X)
  error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
  assert report.error == pytest.approx(error, rel=0.05)


@pytest.mark.slow
def test_random_bits_are_no_limitation():
  def fun(key, x):
    noise = jax.random.normal(key, x.shape, jnp.float16)
    return x.astype(jnp.float16) * noise

  report = diagnostics.compare_precision(fun, KEY, X, progress=False)
  assert report.limitations == () and 0 < report.error < 1e-2


@pytest.mark.parametrize(
  ("old", "new", "is_rounding"),
  [
    (jnp.float8_e4m3fn, jnp.float16, False),
    (jnp.float16, jnp.bfloat16, True),
    (jnp.bfloat16, jnp.float16, True),
    (jnp.float32, jnp.float16, True),
    (jnp.int32, jnp.float16, True),
    (jnp.bool_, jnp.float16, False),
    (jnp.float16, jnp.float32, False),
  ],
)
def test_a_cast_rounds_unless_the_dtype_holds_all_numbers(
  old, new, is_rounding
):
  x = jax.ShapeDtypeStruct((2,), old)
  (eqn,) = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new))(x).eqns
  assert _layers.is_rounding(eqn) is is_rounding
