"""`compare_precision` tells what autocast does, and which product does it."""

import functools
import json
import math
import pickle

from helpers import hijax
from helpers.jax_limits import skip_if_jax_cannot
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import diagnostics
from optax_lossscale.diagnostics import _limits
from optax_lossscale.diagnostics._comparison import _effects, _statistics

KEYS = jax.random.split(jax.random.key(0), 3)
W = jax.random.normal(KEYS[0], (8, 8)) / 3
X = jax.random.normal(KEYS[1], (4, 8))
HERE = "test_comparison.py"


def compare(fun, *args, **kwargs):
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


def branched(w, x):
  branches = [lambda x: x, lambda x: layer("taken", x, w), jnp.cos]
  return lax.switch(jnp.int32(1) + (x[0, 0] > 1e9), branches, x) @ w


@jax.custom_vjp
def ruled(x, w):
  return x @ w


ruled.defvjp(
  lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g)
)


def with_a_rule(w, x):
  return jnp.tanh(ruled(ruled(x, w), w))


@jax.custom_jvp
def with_tangent(x, w):
  return x @ w


with_tangent.defjvp(
  lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]),
)


def with_a_tangent_rule(w, x):
  return with_tangent(x, w) @ w


def convolved(w, x):
  image = x.reshape(1, 4, 8, 1)
  kernel = w.reshape(2, 2, 1, 16)
  out = lax.conv_general_dilated(
    image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  return jnp.sin(out)


def mapped(w, x):
  return jax.vmap(plain, (None, 0))(w, jnp.stack([x, 2 * x]))


PROGRAMS = (
  plain,
  jitted,
  scanned,
  checkpointed,
  branched,
  with_a_rule,
  with_a_tangent_rule,
  convolved,
  mapped,
)


def loops(w, x):
  def goes_on(carry):
    i, x = carry
    return (i < 3) & (jnp.sum(x @ w) < 1e9)

  step = lambda carry: (carry[0] + 1, layer("step", carry[1], w))
  return lax.while_loop(goes_on, step, (0, x))[1]


def mapped_loops(w, x):
  def loop(x, n):
    step = lambda carry: (carry[0] + 1, layer("step", carry[1], w))
    return lax.while_loop(lambda carry: carry[0] < n, step, (0, x))[1]

  return jax.vmap(loop)(x, jnp.arange(4))


def relative_error(exact, other):
  flat = lambda x: np.concatenate([np.ravel(y) for y in jax.tree.leaves(x)])
  a, b = flat(exact), flat(other)
  return np.linalg.norm(b - a) / np.linalg.norm(a)


def gradient(fun):
  return jax.grad(lambda w, x: jnp.mean(fun(w, x) ** 2))


def all_programs():
  """Each program and its gradient. Most of them are slow, for their number."""
  quick = plain, scanned, branched, with_a_rule
  for fun in PROGRAMS:
    marks = () if fun in quick else pytest.mark.slow
    name = f"gradient of {fun.__name__}"
    yield pytest.param(gradient(fun), id=name, marks=marks)
    yield pytest.param(fun, id=fun.__name__, marks=pytest.mark.slow)
  yield pytest.param(loops, id="loops")
  yield pytest.param(mapped_loops, id="mapped loops")


@pytest.mark.parametrize("fun", list(all_programs()))
def test_the_error_is_that_of_autocast(fun):
  skip_if_jax_cannot(jax.jit(fun), W, X)
  report = compare(fun, W, X)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(fun)(W, X)
  real = relative_error(exact, jax.jit(ols.autocast(fun))(W, X))
  assert real > 1e-5
  assert report.error == pytest.approx(real, rel=0.02)
  assert report.cosine == pytest.approx(1, abs=1e-4)
  assert report.worst(9) == report.overflowing == report.notes == ()


def three(w, x):
  return layer("c", layer("b", layer("a", x, w), 2 * w), w)


def test_the_effect_of_a_place_is_the_error_if_all_others_are_kept():
  report = compare(three, W, X)
  assert [row.scope for row in report.products] != ["a", "b", "c"]
  assert sorted(row.scope for row in report.products) == ["a", "b", "c"]
  exact = jax.jit(three)(W, X)
  for row in report.products:
    others = [r.name for r in report.products if r is not row]
    alone = jax.jit(ols.autocast(three, keep_float32=others))(W, X)
    assert row.effect == pytest.approx(relative_error(exact, alone), rel=0.01)
  effects = [row.effect for row in report.products]
  assert effects == sorted(effects, reverse=True)


def test_what_is_kept_is_not_compared():
  report = compare(three, W, X, keep_float32=["a", "b"])
  (row,) = report.products
  assert row.scope == "c"
  assert report.error == row.effect
  assert report.error < compare(three, W, X).error


def test_a_row_tells_where_a_product_stands_and_how_often_it_runs():
  skip_if_jax_cannot(jax.jit(gradient(scanned)), W, X)
  report = compare(gradient(scanned), W, X)
  rows = sorted(report.products, key=lambda row: row.position)
  assert [row.position for row in rows] == list(range(len(rows)))
  forward, back = rows[0], rows[-1]
  assert (forward.scope, forward.backward) == ("step", False)
  assert (back.scope, back.backward) == ("step", True)
  assert forward.source.startswith(f"{HERE}:")
  assert forward.source.endswith("(layer)")
  assert forward.name == f"step at {forward.source}"
  assert (forward.times, back.times) == (3, 6)
  assert {row.primitive for row in rows} == {"dot_general"}


def test_magnitudes_and_losses_are_counted_of_the_worst_array():
  def fun(w, x):
    return x @ w

  x = jnp.zeros((4, 4)).at[0].set(jnp.array([1e-9, -(2.0**-20), 3e4, 0]))
  x = x.at[1].set(2.0**-25)  # Half of the smallest number is rounded to zero.
  w = 4 * jnp.eye(4)
  report = compare(fun, w, x)
  (row,) = report.products
  assert row.largest == 1.2e5
  assert row.headroom == pytest.approx(np.log2(65504 / 1.2e5))
  assert row.lost == 5 / 16
  assert row.subnormal == 5 / 16  # of the result, four times as large
  assert report.overflowing == report.worst() == (row.name,)
  assert (report.error, row.effect, row.error) == (math.inf,) * 3
  assert math.isnan(report.cosine)
  wide = compare(fun, w, x, dtype=jnp.bfloat16)
  (row,) = wide.products
  assert (row.lost, row.subnormal) == (0, 0)
  assert row.headroom > 100
  assert wide.dtype == "bfloat16"


def test_the_error_so_far_is_that_of_the_result():
  w = jax.random.normal(KEYS[2], (200, 200)) / 14
  x = jnp.ones((100, 200)) + W[0, 0]

  def fun(w, x):
    first = x @ w
    return (first - jnp.mean(first, 0)) @ w

  report = compare(fun, w, x)
  narrow = lambda x: x.astype(jnp.float16).astype(jnp.float32)
  first, exact = narrow(narrow(x) @ narrow(w)), x @ w
  found = {row.position: row.error for row in report.products}
  assert found[0] == pytest.approx(relative_error(exact, first), rel=0.15)


def test_differences_that_take_each_other_away_are_seen():
  x = jnp.ones(5 * 1021)
  limits = _limits.limits_of(jnp.dtype("float16"))
  noted = lambda x: _statistics.noted(
    _statistics.empty(), [x, x, x], limits, jnp.uint32(0)
  )
  # Two entries that are in one bucket, since they are so far from each other.
  other = x.at[7].add(10.0).at[7 + 2 * 1021].add(-10.0)
  expected = relative_error(x, other)
  found = _statistics.distance(noted(x), noted(other))
  assert found == pytest.approx(expected, rel=0.5)


def test_a_place_that_stands_out_is_named():
  def fun(w, x):
    x = layer("a", layer("b", layer("c", x, w), w), w)
    with jax.named_scope("bad"):
      y = x @ (3000 * w) - x @ (3000 * w + 0.1 * jnp.eye(8))
    return layer("d", layer("e", y, w), w)

  report = compare(fun, W, X)
  assert report.error > 0.1
  (worst,) = report.worst(3)
  assert worst.startswith("bad at ")
  assert report.worst(0) == ()
  assert f"Stands out: keep_float32={worst!r}." in str(report)
  repaired = compare(fun, W, X, keep_float32=worst)
  assert repaired.error < 1e-2
  assert "No place stands out." in str(repaired)
  by_halves = compare(fun, W, X, effects="worst")
  assert by_halves.worst() == (worst,)
  assert by_halves.products[0].effect == report.products[0].effect


def test_of_many_equal_effects_few_are_looked_for_by_halves():
  calls = []

  def measure(rows):
    calls.append(rows)
    return math.sqrt(len(rows))

  found = _effects.worst(measure, [[i] for i in range(1024)], 32.0)
  assert set(found) == set(range(1024))
  assert set(found.values()) == {1.0}
  assert len(calls) < 10


@pytest.mark.parametrize("bad", [math.inf, 1000.0])
def test_one_bad_effect_of_many_is_found_by_halves(bad):
  calls = []

  def measure(rows):
    calls.append(rows)
    return max(math.sqrt(len(rows)), bad if 700 in rows else 0)

  found = _effects.worst(measure, [[i] for i in range(1024)], bad)
  assert [i for i, effect in found.items() if effect == bad] == [700]
  assert len(calls) == 20
  assert _effects.worst(measure, [], 0.0) == {}


def test_results_are_named_and_the_one_that_is_furthest_off_counts():
  def fun(params, x):
    good, bad = params["w"], x @ params["w"]
    return (jnp.float32(1e6), {"n": 3}), ({"good": good}, [bad])

  report = compare(fun, {"w": W}, X)
  names = "[0][0]", "[1][0]['good']", "[1][1][0]"
  assert tuple(report.errors) == names
  assert report.errors["[0][0]"] == report.errors["[1][0]['good']"] == 0
  assert report.errors["[1][1][0]"] == report.error > 1e-5
  together = compare(lambda w: {"a": (1e6 * W, w @ w)}, W)
  assert together.errors["['a'][1]"] > 1e-5 > together.error > 0


def test_an_error_relative_to_nothing_is_not_finite():
  zero = compare(lambda w, x: 0 * (x @ w), W, X)
  assert (zero.error, zero.cosine) == (0, 1)
  tiny = lambda w, x: (x @ w) - x @ (w + 0)
  assert compare(tiny, W, X).error == 0
  noise = _statistics.relative
  assert noise(1.0, 0.0) == noise(math.nan, 1.0) == math.inf


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_in_float32_is_told(bad):
  report = compare(gradient(plain), W.at[0, 0].set(bad), X)
  assert report.error == math.inf
  assert "not finite in float32 either: find_overflow" in str(report)
  size = lambda x: 1e25 * jnp.abs(x)
  large = compare(lambda w, x: jnp.tanh(size(x) @ size(w)), W, X)
  assert large.products[0].headroom == -math.inf
  assert large.notes == ()


def test_complex_results_are_compared():
  fun = lambda w, x: (x @ w) * (1 + 2j)
  assert compare(fun, W, X).error == pytest.approx(
    compare(lambda w, x: x @ w, W, X).error, rel=1e-3
  )


def test_a_function_without_products_has_an_empty_report():
  report = compare(lambda x: {"y": x + 1, "n": 3}, X)
  assert (report.error, report.products, report.worst()) == (0, (), ())
  assert str(report).startswith("No float32 matrix products and no convol")
  half = W.astype(jnp.float16)
  assert compare(lambda w: w @ w, half).products == ()
  assert compare(lambda: None).cosine == 1


def test_what_autocast_cannot_enter_is_told():
  def fun(w, x):
    y = lax.custom_linear_solve(
      lambda y: y + y @ w, x, lambda _, b: b @ w, symmetric=True
    )
    return y + x @ w

  report = compare(fun, W, X)
  (note,) = report.notes
  assert note.startswith(
    f"Runs as it is written: custom_linear_solve at {HERE}:"
  )
  assert str(report).splitlines()[-1] == note


def test_primitives_of_hijax_are_entered_where_autocast_enters_them():
  programs = checkpointed, with_a_rule, with_a_tangent_rule
  plain_errors = [compare(fun, W, X).error for fun in programs]
  with hijax.flags_on("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"):
    for fun, error in zip(programs, plain_errors, strict=True):
      report = compare(fun, W, X)
      assert report.error == pytest.approx(error, rel=1e-3)
      assert report.notes == ()


def test_a_primitive_of_hijax_that_is_not_known_is_told():
  def fun(w, x):
    f = lambda y: y + jnp.sum(jnp.sin(x @ w)) * y - 1
    solve = lambda f, guess: guess - f(guess)
    tangent_solve = lambda g, y: y / g(jnp.ones_like(y))
    root = lax.custom_root(f, jnp.ones(()), solve, tangent_solve)
    return root * (x @ w)

  names = {eqn.primitive.name for eqn in jax.make_jaxpr(fun)(W, X).eqns}
  if "call_hi_primitive" not in names:
    pytest.skip("Before JAX 0.12 this is none.")
  report = compare(fun, W, X)
  (note,) = report.notes
  assert note.startswith("Runs as it is written: CustomRoot at")


def test_what_is_printed_has_a_row_for_each_of_the_worst_places():
  def fun(w, x):
    for i in range(25):
      x = layer(f"layer{i}", x, w)
    return x

  lines = str(compare(fun, W, X)).splitlines()
  assert lines[0].startswith("float16 against float32: error ")
  assert lines[2].split()[:3] == ["line", "effect", "so"]
  assert sum(line.startswith("dot_general  layer") for line in lines) == 20
  assert lines[-1] == "and 5 more places"


def test_a_loss_scale_that_is_too_large_is_told():
  loss = lambda w: jnp.mean((X @ w) ** 2)

  def lines(log2, fun=loss):
    state = ols.FixedLossScale(2.0**log2).init()
    report = compare(ols.grad(fun, state), W)
    assert report.overflowing == () or fun is not loss
    return str(report).splitlines()

  too_large = "Only the backward pass overflows, by 2**{} or less: lower the"
  assert lines(10)[1] == "No place stands out."
  for log2 in 20, 30:
    told = lines(log2)[1].removesuffix(" loss scale first.")
    cotangents = 2.0**log2 * (X @ W) / 16
    largest = jnp.max(jnp.abs(X.T @ cotangents))
    assert told == too_large.format(math.ceil(np.log2(largest / 65504)))
  # It is not the scale that is too large.
  forward = lambda w: jnp.mean(jnp.sin((1e6 * X) @ w))
  assert lines(20, forward)[1] == "Places that overflow: 1, see overflowing."


def test_a_report_is_made_of_plain_data():
  report = compare(three, W, X)
  data = json.loads(json.dumps(report.as_dict()))
  assert data["products"][0]["scope"] == report.products[0].scope
  assert set(data) == {
    "cosine",
    "dtype",
    "error",
    "errors",
    "notes",
    "products",
    "standing_out",
  }
  assert pickle.loads(pickle.dumps(report)) == report


def test_what_prints_does_not_print_and_what_is_asked_for_is_asked():
  asked = []

  def ask(x):
    asked.append(1)
    return x

  def fun(w, x):
    y = x @ w
    jax.debug.print("never {}", jnp.sum(y))
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jax.pure_callback(ask, shape, y) @ w

  assert compare(fun, W, X).error > 0
  assert len(asked) >= 4


def test_nothing_is_printed_unless_it_takes_long(capsys, monkeypatch):
  diagnostics.compare_precision(plain, W, X)
  quick = capsys.readouterr()
  monkeypatch.setattr(
    "optax_lossscale.diagnostics._comparison._progress._SILENT_SECONDS", -1
  )
  diagnostics.compare_precision(plain, W, X, progress=False)
  assert capsys.readouterr() == ("", "")
  diagnostics.compare_precision(plain, W, X)
  out, err = capsys.readouterr()
  assert out == quick.out == ""
  assert err.startswith("\rcompare_precision: run 1 of 4, ")
  assert "run 4 of 4" in err and err.endswith(" s\n")


@pytest.mark.parametrize(
  ("args", "kwargs", "error", "message"),
  [
    ((3,), {}, TypeError, "fun must be a function, got fun = 3"),
    (
      (plain, jax.ShapeDtypeStruct((8, 8), jnp.float32), X),
      {},
      TypeError,
      "needs arrays",
    ),
    (
      (plain, W, X),
      {"dtype": jnp.float32},
      TypeError,
      "dtype must be float16 or bfloat16, got dtype = float32",
    ),
    ((plain, W, X), {"keep_float32": 1}, TypeError, "keep_float32 must be"),
    ((plain, W, X), {"keep_float32": "x"}, ValueError, "got 'x', which sel"),
    (
      (plain, W, X),
      {"effects": "some"},
      ValueError,
      "effects must be 'all' or 'worst', got effects = 'some'",
    ),
  ],
)
def test_bad_input_is_refused(args, kwargs, error, message):
  with pytest.raises(error, match=message):
    compare(*args, **kwargs)


def test_under_jit_it_is_refused():
  with pytest.raises(TypeError, match=r"outside jit, .* a tracer at w\."):
    jax.jit(lambda w: compare(plain, w, X))(W)
  with pytest.raises(TypeError, match=r"outside jit, .* on the host\."):
    jax.jit(lambda: compare(plain, W, X))()


@pytest.mark.parametrize(
  "setting",
  [
    lambda: jax.debug_nans(True),
    lambda: jax.debug_infs(True),
    lambda: jax.disable_jit(True),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.enable_x64(True),
  ],
)
def test_it_runs_with_every_setting_of_jax(setting):
  def fun(w, x):
    x = lax.fori_loop(0, 3, lambda _, x: layer("step", x, w), x)
    return x @ (1e5 * w), lax.complex(x, x)

  expected = compare(fun, W, X)
  assert expected.error == math.inf
  with setting():
    report = compare(fun, W, X)
  assert report.overflowing == expected.overflowing
  found, wanted = report.errors["[1]"], expected.errors["[1]"]
  assert found == pytest.approx(wanted, rel=0.02)
