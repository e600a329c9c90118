"""`compare_precision` reports the error of autocast and of each matmul."""

import collections
import contextlib
import functools
import itertools
import math

from flax import linen as nn
from helpers import custom_rules, hijax, jaxprs, parametrize_slow, sharding
from helpers.bits import assert_same_bits
from helpers.jax_limits import skip_if_jax_cannot
from helpers.planted_layers import normal
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.diagnostics import (
  _instrumented_program,
)
from optax_lossscale.diagnostics._precision import (
  _reference_program,
)

W = normal(8, 8, seed=0)
X = normal(4, 8, seed=1) * 2
HERE = "test_compare_precision.py"
F32 = jnp.float32


def compare(fun, *args, dtype=jnp.float16, keep_float32=(), **kwargs):
  cast = ols.autocast(fun, dtype, keep_float32=keep_float32)
  return compare_grads(cast, *args, **kwargs)


def compare_grads(fun, *args, **kwargs):
  return diagnostics.compare_precision(fun, *args, progress=False, **kwargs)


def layer(name, x, w):
  with jax.named_scope(name):
    return jnp.tanh(x @ w)


def plain(w, x):
  return layer("second", layer("first", x, w), w)


def jitted(w, x):
  block = jax.jit(functools.partial(layer, "block"))
  return block(block(x, w), w)


def scanned(w, x):
  step = lambda x, w: (layer("step", x, w), jnp.sum(x @ w))
  x, sums = lax.scan(step, x, jnp.stack([w, 2 * w, w]), reverse=True)
  return x * jnp.sum(sums)


def checkpointed(w, x):
  block = jax.checkpoint(functools.partial(layer, "block"))
  return block(block(x, w), w)


# JAX rounds the values that it saves, which are not roundings of the user.
SAVED_BY_TWO = jax.checkpoint_policies.save_from_both_policies(
  jax.checkpoint_policies.dots_saveable,
  jax.checkpoint_policies.save_only_these_names("hidden"),
)


def with_two_policies(w, x):
  block = jax.checkpoint(lambda x: jnp.cos(x @ w), policy=SAVED_BY_TWO)
  return block(block(x))


def branched(w, x):
  branches = [lambda x: x, lambda x: layer("taken", x, w), jnp.cos]
  return lax.switch(jnp.int32(1) + (x[0, 0] > 1e4), branches, x) @ w


ruled = custom_rules.make_matmul_with_vjp()
with_tangent = custom_rules.make_matmul_with_jvp()


def with_a_rule(w, x):
  return jnp.tanh(ruled(ruled(x, w), w))


def with_a_tangent_rule(w, x):
  return with_tangent(x, w) @ w


def convolved(w, x):
  image = x.reshape(1, 4, 8, 1)
  kernel = w.reshape(2, 2, 1, 16)
  out = lax.conv_general_dilated(
    image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  return jnp.sin(out)


def mapped_loops(w, x):
  def loop(x, n):
    step = lambda carry: (carry[0] + 1, layer("step", carry[1], w))
    return lax.while_loop(lambda carry: carry[0] < n, step, (0, x))[1]

  return jax.vmap(loop)(x, jnp.arange(4))


@jax.custom_vjp
def scaled_matmul(w, x):
  return jnp.cumsum(x @ w, -1) / 8


scaled_matmul.defvjp(
  lambda w, x: (scaled_matmul(w, x), (w, x)),
  lambda residuals, g: (residuals[1].T @ g, jnp.tanh(g @ residuals[0].T)),
)


def indices(w, x):
  x, rows = x @ w, w[jnp.array([0, 3, 3, 1])]
  return jnp.sort(x, -1) * rows + x.at[:, :3].max(rows[:, :3])


def pooled(w, x):
  pools = (
    nn.max_pool(x[:, :, None], (4,), (2,)),
    nn.avg_pool(x[..., None], (2,)),
  )
  flat = jnp.concatenate([pool.reshape(4, -1) for pool in pools], 1)
  return flat @ jnp.concatenate([w, w])[: 3 + 7]


def on_devices(w, x):
  mesh = sharding.make_mesh((2,), ("i",))
  fun = lambda w, x: jnp.tanh(x @ w) * lax.pmean(x.sum(), "i")
  return jax.shard_map(
    fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i")
  )(w, x)


def with_ref(w, x):
  ref = jax.new_ref(x)
  ref[...] = jnp.tanh(ref[...] @ w)
  ref[0] += 1
  return ref[...]


def inside_autocast(w, x):
  w, dtype = w.astype(jnp.float32), x.dtype
  by_hand = lambda w, x: jnp.tanh(x.astype(dtype) @ w.astype(dtype))
  # With float32, nothing is cast, as in the program to compare with.
  cast = ols.autocast if dtype != jnp.float32 else lambda fun, dtype: fun
  return cast(lambda w, x: by_hand(w, x @ w), dtype)(w, x.astype(jnp.float32))


def relative_error(exact, other):
  flat = lambda x: np.concatenate([np.ravel(y) for y in jax.tree.leaves(x)])
  a, b = flat(exact), flat(other)
  return np.linalg.norm(b - a) / np.linalg.norm(a)


def compare_with_runs(fun, trained, **kwargs):
  """Return the report on a function, whose error is that of its runs."""
  before = jax.jit(trained, **kwargs)(W, X)
  report = compare_grads(trained, W, X)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(fun)(W, X)
  real = relative_error(exact, before)
  assert real > 1e-5
  assert report.error == pytest.approx(real, rel=0.02)
  again = jax.jit(lambda *args: trained(*args), **kwargs)(W, X)
  assert_same_bits(again, before)  # A comparison changes nothing.
  return report


def gradient(fun, cast=lambda fun: fun, dtype=F32):
  """Return the gradient of a program, which may compute in half precision."""

  def loss(w, x):
    return jnp.mean(fun(w.astype(dtype), x.astype(dtype)).astype(F32) ** 2)

  # JAX has no gradient of a while loop.
  return (jax.jacfwd if fun is mapped_loops else jax.grad)(cast(loss))


# Autocast finds the matmuls of each of these in another way. Further programs
# have operations that it leaves in float32.
WITH_MATMULS = (
  plain, jitted, scanned, checkpointed, branched, with_a_rule,
  with_a_tangent_rule, convolved, with_two_policies, mapped_loops,
)  # fmt: skip
PROGRAMS = (
  *WITH_MATMULS, scaled_matmul, indices, pooled, on_devices, with_ref,
  inside_autocast,
)  # fmt: skip
WAYS = {
  "autocast": lambda fun: gradient(fun, ols.autocast),
  "autocast, outside": lambda fun: ols.autocast(gradient(fun)),
  "float16": lambda fun: gradient(fun, dtype=jnp.float16),
  "bfloat16": lambda fun: gradient(fun, dtype=jnp.bfloat16),
}
CASES = [*itertools.product(PROGRAMS, WAYS)]
# The others run at night.
SLOW = [
  *((x, "autocast" if x in WITH_MATMULS else "float16") for x in PROGRAMS),
  *((x, "autocast, outside") for x in (scanned, checkpointed, branched)),
]


@parametrize_slow(
  "case",
  [(with_a_rule, "autocast")],
  CASES,
  SLOW,
  ids=lambda x: f"{x[0].__name__}, {x[1]}",
)
def test_the_error_is_that_against_a_program_in_float32(case):
  program, way = case
  fun, trained = gradient(program), WAYS[way](program)
  skip_if_jax_cannot(jax.jit(fun), W, X)
  in_autocast, kwargs = "autocast" in way, {}
  if not in_autocast:  # Otherwise XLA does not round all values.
    options = _instrumented_program.make_compiler_options([X])
    kwargs["compiler_options"] = options
  report = compare_with_runs(fun, trained, **kwargs)
  assert report.overflowing == report.limitations == ()
  # By hand, the only line that computes something may be one.
  assert report.outliers == () or not in_autocast
  assert report.is_accurate
  assert report.dtype == ("bfloat16" if way == "bfloat16" else "float16")


@jax.custom_vjp
def partly_kept(w, x):
  return jnp.tanh(x @ w) @ w


def partly_backward(residuals, g):
  with jax.named_scope("named"):
    return jax.vjp(lambda w, x: jnp.tanh(x @ w) @ w, *residuals)[1](g)


partly_kept.defvjp(lambda w, x: (partly_kept(w, x), (w, x)), partly_backward)


# Transposed matmuls may have other dtypes than the forward matmuls.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("fun", "names", "size"),
  [
    (lambda w, x: (1e-4 * x[:1]) @ w, (), 1e-9),
    (lambda w, x: partly_kept(w, x @ w), "*named", 1.0),
  ],
  ids=["one example whose gradients are lost", "a rule that is kept"],
)
def test_the_error_equals_the_error_of_autocast_if_derivatives_differ(
  fun, names, size
):
  loss = lambda w, x: size * jnp.sum(jnp.sin(fun(w, x)))
  trained = jax.grad(ols.autocast(loss, keep_float32=names))
  compare_with_runs(jax.grad(loss), trained)


@pytest.mark.slow
def test_a_part_that_is_cast_by_hand_is_compared_with_float32():
  """The part has a scope that looks like the tag of autocast."""

  def fun(w, x, dtype=jnp.float32, cast=lambda fun: fun):
    with jax.named_scope("autocast-float16"):
      y = (x.astype(dtype) @ w.astype(dtype)) * dtype(3)
    return jnp.sin(y[:, ::-1].astype(jnp.float32) + cast(plain)(w, x))

  trained = functools.partial(fun, dtype=jnp.float16, cast=ols.autocast)
  report = compare_with_runs(fun, trained)
  assert {row.in_autocast for row in report.layers} == {False, True}


@pytest.mark.slow
def test_one_function_may_contain_two_precisions():
  fun = lambda w, x: plain(w, jitted(w, x))
  trained = lambda w, x: ols.autocast(plain, jnp.bfloat16)(
    w, ols.autocast(jitted)(w, x)
  )
  report = compare_with_runs(fun, trained)
  assert report.dtype == "bfloat16 and float16"
  rows = {row.name_scope: row.log2_headroom for row in report.layers}
  assert rows["first"] > 100 > rows["block"]


def three(w, x):
  return layer("c", layer("b", layer("a", x, w), 2 * w), w)


@functools.cache
def compare_three():
  return compare(three, W, X)


def test_the_isolated_error_is_the_error_if_all_other_layers_are_kept():
  report = compare_three()
  assert [row.name_scope for row in report.layers] != ["a", "b", "c"]
  exact = jax.jit(three)(W, X)
  for row in report.layers:
    others = [r.name for r in report.layers if r is not row]
    alone = jax.jit(ols.autocast(three, keep_float32=others))(W, X)
    assert row.isolated_error == pytest.approx(
      relative_error(exact, alone), rel=0.01
    )
  effects = [row.isolated_error for row in report.layers]
  assert effects == sorted(effects, reverse=True)


def test_a_row_is_about_a_matmul_with_a_location():
  rows = sorted(compare_three().layers, key=lambda row: row.program_index)
  for i, (name, row) in enumerate(zip("abc", rows, strict=True)):
    assert (row.program_index, row.name_scope, row.name) == (i, name, name)
    assert (row.primitive, row.run_count) == ("dot_general", 1)
    assert row.source_line.startswith(f"{HERE}:")
    assert not row.backward and row.in_autocast and row.dtype == "float16"
    assert row.flops == 2 * 4 * 8 * 8


def test_a_layer_of_a_loop_is_counted_in_each_pass():
  fun = gradient(scanned, ols.autocast)
  skip_if_jax_cannot(jax.eval_shape, fun, W, X)
  rows = [layer.as_row() for layer in jaxprs.list_layers(fun, W, X)]
  forward, back = rows[0], rows[-1]
  assert (forward.name, forward.backward) == ("step", False)
  assert (back.name, back.backward) == ("step", True)
  assert forward.source_line.startswith(f"{HERE}:")
  assert forward.source_line.endswith("(layer)")
  assert (forward.run_count, back.run_count) == (3, 6)
  assert {row.primitive for row in rows} == {"dot_general"}


def test_magnitude_and_underflow_are_those_of_the_worst_array():
  def fun(w, x):
    return x @ w

  x = np.zeros((4, 4), np.float32)
  x[0] = 1e-9, -(2.0**-20), 3e4, 0
  x[1] = 2.0**-25  # Half of the smallest number is rounded to zero.
  w = 4 * np.eye(4, dtype=np.float32)
  report = compare(fun, w, x)
  (row,) = report.layers
  assert row.amax == 1.2e5
  assert row.log2_headroom == pytest.approx(np.log2(65504 / 1.2e5))
  assert row.underflow_fraction == 5 / 16
  assert row.subnormal_fraction == 5 / 16  # of the result, four times as large
  assert report.overflowing == report.outliers[:1] == (row.name,)
  assert report.error == row.isolated_error == math.inf
  wide = compare(fun, w, x, dtype=jnp.bfloat16)
  (row,) = wide.layers
  assert (row.underflow_fraction, row.subnormal_fraction) == (0, 0)
  assert row.log2_headroom > 100
  assert wide.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_numbers_are_rounded_as_by_a_conversion(dtype):
  bits = np.random.default_rng(0).integers(0, 2**32, 10**5, np.uint32)
  exponents = np.random.default_rng(1).uniform(-30, 20, 10**5)
  edges = [65504, 65519.99, 65520, 2.0**-24, 2.0**-25, 2.0**-14, 0, -0.0]
  next_ones = np.nextafter(np.float32(edges), np.float32(1))
  special = np.float32([*edges, np.inf, -np.inf, np.nan])
  random = bits.view(np.float32), 2 ** np.float32(exponents)
  x = np.concatenate([*random, next_ones, special])
  x = np.where(np.abs(x) < 2.0**-126, 0, x)  # XLA flushes what is subnormal.
  found = jax.jit(
    functools.partial(_reference_program.round_to_dtype, dtype=np.dtype(dtype)),
    compiler_options=_instrumented_program.make_compiler_options(
      [jnp.ones(())]
    ),
  )(x)
  with np.errstate(over="ignore", invalid="ignore"):
    expected = x.astype(dtype).astype(np.float32)
  np.testing.assert_array_equal(found, expected)


def test_results_are_named():
  def fun(params, x):
    good, bad = params["w"], x @ params["w"]
    return (jnp.float32(1e6), {"n": 3}), ({"good": good}, [bad])

  report = compare(fun, {"w": W}, X)
  names = "0/0", "1/0/good", "1/1/0"
  assert tuple(report.array_errors) == names
  assert report.array_errors["0/0"] == report.array_errors["1/0/good"] == 0
  assert report.array_errors["1/1/0"] == report.error > 1e-5


def test_nonfinite_float32_results_are_reported():
  fun = lambda w, x: (1e9 * x) @ w  # which overflows in float16
  report = compare(fun, np.where(np.eye(8) > 0, math.inf, W), X)
  assert not report.reference_is_finite
  assert report.layers == report.outliers == report.overflowing == ()


def test_an_inf_in_float32_has_no_magnitude():
  large = lambda x: 1e25 * jnp.abs(x)
  report = compare(lambda w, x: jnp.tanh(large(x) @ large(w)), W, X)
  assert 1e25 < report.layers[0].amax < math.inf
  assert report.reference_is_finite


@pytest.mark.parametrize(
  ("fun", "has_matmuls"),
  [
    (plain, True),
    (jax.jit(gradient(plain)), True),
    (lambda w, x: x + 1, False),
    (lambda w, x: jnp.sin(x) + 0 * len([x.astype(jnp.float16)]), False),
    (ols.keep_float32(plain), False),
  ],
)
def test_a_function_without_half_precision_is_refused(fun, has_matmuls):
  with pytest.raises(ValueError, match="rounds nothing to float16") as error:
    compare_grads(fun, W, X)
  fix = "such as ols.grad(ols.autocast(loss_fn), opt_state)."
  assert (fix in str(error.value)) is has_matmuls


def test_results_without_floats_are_refused():
  for kind in jnp.argmax, jnp.isnan:
    fun = lambda w, x, kind=kind: {"found": kind(x @ w)}
    with pytest.raises(ValueError, match="<lambda> returns no floats and"):
      compare_grads(ols.autocast(fun), W, X)


@pytest.mark.slow
def test_primitives_of_hijax_are_entered_where_autocast_enters_them():
  programs = checkpointed, with_a_rule, with_a_tangent_rule
  plain_errors = [compare(fun, W, X).error for fun in programs]
  with hijax.enable_flags("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"):
    for fun, error in zip(programs, plain_errors, strict=True):
      report = compare(fun, W, X)
      assert report.error == pytest.approx(error, rel=1e-3)
      assert report.limitations == ()


def test_reports_silence_debug_prints_and_run_other_callbacks(capfd):
  answers = []

  def ask(x):
    answers.append(1)
    return x

  def fun(w, x):
    y = x @ w
    jax.debug.print("never {}", jnp.sum(y))
    jax.debug.callback(lambda x: print("nor this", x), jnp.sum(y))
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jax.pure_callback(ask, shape, y) @ w

  assert compare(fun, W, X).error > 0
  assert len(answers) >= 4
  assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_reports_on_shard_map_count_all_devices_and_silence_prints(capfd):
  show = lambda x: jax.debug.print("never {}", jnp.sum(x))

  def body(x, w):
    show(x)
    return jnp.tanh(x @ w), None

  def block(x, w):
    x = lax.scan(body, x, jnp.stack([w, w]))[0]
    return lax.cond(x[0, 0] < 9, lambda x: body(x, w)[0], jnp.cos, x)

  mesh = sharding.make_mesh((2,), ("i",))
  on_devices = jax.shard_map(
    block, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")
  )
  report = compare(lambda w, x: on_devices(x, w), W, X)
  alone = compare(lambda w, x: block(x, w), W, X)
  assert capfd.readouterr().out == ""
  assert report.limitations == ()
  assert report.error == pytest.approx(alone.error, rel=1e-3)
  # The sums of half a batch may round differently, by a last bit.
  for row, one in zip(report.layers, alone.layers, strict=True):
    assert row.run_count == 2 * one.run_count
    assert row.amax == pytest.approx(one.amax, rel=1e-6)
    assert row.isolated_error == pytest.approx(one.isolated_error, rel=1e-3)


def potential(params, x):
  """Its derivative for x is the product of a large number with weights."""
  return 1e6 * jnp.sum(jnp.tanh(x @ params["force"]))


def by_rows(params, x):
  return jax.vmap(jax.grad(potential, 1), (None, 0))(params, x)


def by_scan(params, x):
  force = lambda _, row: (None, jax.jit(jax.grad(potential, 1))(params, row))
  return lax.scan(force, None, x[:, None])[1][:, 0]


def second_derivative(params, x):
  return jnp.sum(jax.hessian(potential, 1)(params, x[:1]), (0, 2, 3))


INSIDE = {
  "grad": jax.grad(potential, 1),
  "vmap": by_rows,
  "scan": by_scan,
  "checkpoint": jax.checkpoint(jax.grad(potential, 1)),
  "hessian": second_derivative,
}
POTENTIAL_PARAMS = {"force": W, "plain": W.T}


def make_potential_loss(derivative):
  def loss_fn(params, x):
    scores = jnp.tanh(x @ params["plain"])
    return jnp.mean((1e-6 * derivative(params, x) - scores) ** 2)

  return loss_fn


@pytest.mark.parametrize("name", INSIDE)
def test_a_derivative_inside_of_the_loss_is_in_the_forward_pass(name):
  def count_runs(fun):
    counts = {True: collections.Counter(), False: collections.Counter()}
    for layer in jaxprs.list_layers(fun, POTENTIAL_PARAMS, X):
      row = layer.as_row()
      counts[row.backward][row.name] += row.run_count
    return counts

  loss_fn = ols.autocast(make_potential_loss(INSIDE[name]))
  alone, both = count_runs(loss_fn), count_runs(jax.grad(loss_fn))
  assert both[False] == alone[False] + alone[True]
  assert set(both[True]) == {"force", "plain"}


@pytest.mark.slow
def test_no_loss_scale_helps_a_derivative_inside_of_the_loss():
  loss_fn = make_potential_loss(INSIDE["grad"])
  state = ols.FixedLossScale(2.0**-20).init()
  trained = ols.grad(ols.autocast(loss_fn), state)
  report = compare_grads(trained, POTENTIAL_PARAMS, X)
  assert report.suggested_log2_scale_change == 0
  assert report.overflowing == ("force",)
  hit = diagnostics.find_overflow(trained, POTENTIAL_PARAMS, X)
  assert (hit.param_path, hit.backward) == ("force", False)
  # The backward pass of the loss is another thing.
  kept = ols.autocast(loss_fn, keep_float32=report.overflowing)
  trained = ols.grad(kept, ols.FixedLossScale(2.0**40).init())
  report = compare_grads(trained, POTENTIAL_PARAMS, X)
  assert report.suggested_log2_scale_change < 0
  assert report.outliers == report.overflowing == ()
  hit = diagnostics.find_overflow(trained, POTENTIAL_PARAMS, X)
  assert (hit.param_path, hit.backward) == ("plain", True)


SETTINGS = {
  "debug_nans and debug_infs": {jax.debug_nans: True, jax.debug_infs: True},
  "disable_jit": {jax.disable_jit: True},
  "strict promotion and x64": {
    jax.enable_x64: True,
    jax.numpy_dtype_promotion: "strict",
    jax.numpy_rank_promotion: "raise",
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_jax_do_not_change_reports(name):
  def fun(w, x):
    size = lambda i: jnp.where(i == 2, 1e5, 1.0)
    step = lambda i, x: size(i) * layer("step", x, w)
    return lax.fori_loop(0, 4, step, x), lax.complex(x @ w, x)

  trained = ols.autocast(fun)
  expected = compare_grads(trained, W, X)
  assert expected.overflowing == ("step",)
  with contextlib.ExitStack() as stack:
    for setting, value in SETTINGS[name].items():
      stack.enter_context(setting(value))
    report = compare_grads(trained, W, X)
    hit = diagnostics.find_overflow(trained, W, X)
  assert report.overflowing == expected.overflowing
  found, wanted = report.array_errors["1"], expected.array_errors["1"]
  assert found == pytest.approx(wanted, rel=0.02)
  assert hit.eqn_path == "scan[3]/convert_element_type"


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_a_matmul_in_the_condition_of_a_while_loop_is_measured(mapped):
  def loop(params, x):
    def goes_on(carry):
      i, x = carry
      far = jnp.max(jnp.abs(1e5 * x @ params["stop"]))  # condition
      return (i < 3) & (far < jnp.inf)

    step = lambda carry: (carry[0] + 1, carry[1] @ params["step"])
    return lax.while_loop(goes_on, step, (0, x))[1]

  fun = lambda params, x: loop(params, x)
  if mapped:
    fun = lambda params, x: jax.vmap(loop, (None, 0))(params, x[None])
  report = compare(fun, {"stop": W, "step": W / 4}, X)
  rows = {row.name: row for row in report.layers}
  assert set(rows) == {"stop", "step"}
  # The number of iterations is unknown before it runs.
  assert (rows["stop"].run_count, rows["step"].run_count) == (1, 1)
  assert rows["stop"].amax > 65504 > rows["step"].amax
  assert report.overflowing == ("stop",)
  kept = compare(fun, {"stop": W, "step": W / 4}, X, keep_float32="stop")
  assert kept.overflowing == () and kept.error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("count", "share"), [(2, 0.84), (4, 0.74)])
def test_the_error_includes_sums_over_devices_in_half_precision(count, share):
  """XLA adds up in float16 what each device has."""
  mesh = sharding.make_mesh((count,), ("i",))
  x, w = normal(64, 512, seed=0) * 8, normal(512, 64, seed=1)
  specs = P(None, "i"), P("i", None)
  x, w = sharding.put_on_devices(
    (x, w), sharding.to_named_shardings(mesh, specs)
  )
  cast = ols.autocast(lambda w, x: x @ w)
  report = compare_grads(cast, w, x)
  exact = np.float64(x) @ np.float64(w)
  real = relative_error(exact, np.float64(jax.jit(cast)(w, x)))
  assert report.error == pytest.approx(real, rel=0.01)
  # The error of the layer alone is that of its operands and its result.
  (row,) = report.layers
  assert row.isolated_error / real == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("dtype", [F32, jnp.float16])
def test_operands_and_results_are_rounded_to_the_dtype_of_autocast(dtype):
  # 2049 is not in float16.
  x, w = jnp.full((2, 3), 683, F32), jnp.ones((3, 2), dtype)
  report = compare(lambda x, w: x @ w, x, w)
  assert report.error == pytest.approx(1 / 2049)
