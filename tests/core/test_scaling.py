"""Scaling, unscaling, differentiating: the true loss, the true gradients."""

import functools
import inspect
import linecache
import threading
import warnings

import equinox as eqx
from flax import nnx
from helpers import custom_rules, parametrize_slow
from helpers.bits import has_same_bits
from helpers.leaves import FLOATS, LEAF_GROUPS, NON_FLOATS
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale import _grads


def make_state(scale):
  return ols.FixedLossScale(scale).init()


def test_unscale_undoes_scale_bit_for_bit_at_every_power_of_two():
  """A reciprocal of 2**127 is flushed to zero, and every gradient with it."""
  g = jnp.array([1.0, -1.5, 3.1415927, -0.0, 0.0, 1.0000001])

  @jax.jit
  def there_and_back(g, state):
    return ols.unscale_grads(ols.scale_loss(g, state), state)

  for k in range(-126, 127):
    got = there_and_back(g, make_state(2.0**k))
    assert has_same_bits(got, g), k


@parametrize_slow("dtype", ["float16"], ["float16", "bfloat16", "float32"])
def test_the_loss_is_exact_and_in_its_own_dtype_whatever_the_scale(dtype):
  """3 * 2**15 is no float16: Flax reports inf on a step that it applies."""
  fun = lambda w: (w * 3).astype(dtype)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for scale in (2.0**15, 2.0**17):
      differentiated = ols.value_and_grad(fun, make_state(scale))
      loss, _ = differentiated(np.float32(1.0))
      assert (loss, loss.dtype) == (3.0, dtype)


def test_a_float64_loss_keeps_its_precision():
  with jax.enable_x64(True):
    loss = jnp.float64(1 + 2.0**-50)
    scaled = ols.scale_loss(loss, make_state(2.0**15))
    assert scaled.dtype == jnp.float64
    assert scaled == 2.0**15 + 2.0**-35
    assert ols.unscale_grads(scaled, make_state(2.0**15)) == loss


def test_a_float16_loss_warns_while_tracing_and_trains():
  policy = ols.DynamicLossScale(2.0**17)
  state = policy.init()

  @jax.jit
  def step(state):
    loss, grad = ols.value_and_grad(float16_loss, state)(jnp.float16(0.25))
    return policy.adjust(state, ols.all_finite(grad)), loss, grad

  with pytest.warns(UserWarning, match="float16 loss.*Return the loss"):
    state, loss, grad = step(state)
  assert loss == 0.125
  assert not jnp.isfinite(grad)
  for _ in range(2):  # No further warning: warnings are errors here.
    state, loss, grad = step(state)
  assert (state.loss_scale, grad) == (2.0**15, 0.5)


def float16_loss(w):
  return w * jnp.float16(0.5)


def use_jax():
  fun = ols.value_and_grad(float16_loss, make_state(2.0))
  return fun, jnp.float16(1)


def use_nnx():
  loss_fn = lambda model: float16_loss(model.kernel[0, 0])
  fun = ols.value_and_grad(loss_fn, make_state(2.0), using=nnx.value_and_grad)
  rngs = nnx.Rngs(0)
  return nnx.jit(fun), nnx.Linear(1, 1, param_dtype=jnp.float16, rngs=rngs)


def use_a_function_of_ones_own():
  def using(fun, **kwargs):
    differentiated = jax.value_and_grad(fun, **kwargs)
    return lambda *args: differentiated(*args)

  fun = ols.value_and_grad(float16_loss, make_state(2.0), using=using)
  return fun, jnp.float16(1)


@pytest.mark.parametrize(
  "use",
  [
    use_jax,
    use_nnx,
    use_a_function_of_ones_own,
  ],
)
def test_the_warning_of_a_float16_loss_points_to_the_users_line(use):
  fun, params = use()
  with pytest.warns(UserWarning, match="float16 loss") as warned:
    fun(params)  # the line
  (warning,) = warned
  assert warning.filename == __file__
  assert "# the line" in linecache.getline(__file__, warning.lineno)


def test_a_float8_loss_warns_too_and_a_bfloat16_loss_does_not():
  state = ols.FixedLossScale(2.0).init()
  fun = lambda dtype: ols.value_and_grad(lambda w: w.astype(dtype), state)
  with pytest.warns(UserWarning, match=r"float8_e4m3fn loss.*exceed 448\."):
    fun(jnp.float8_e4m3fn)(jnp.float32(1.0))
  fun(jnp.bfloat16)(jnp.float32(1.0))  # No warning, which would be an error.


def test_unscale_grads_treats_every_leaf_type_as_documented():
  got = ols.unscale_grads(LEAF_GROUPS, make_state(2.0))
  assert has_same_bits(got["others"], NON_FLOATS)
  wide = {"f16": "float32", "f8": "float32", "f8_5": "float32"}
  for name, leaf in FLOATS.items():
    out = got["floats"][name]
    expected = np.asarray(leaf).astype(
      wide.get(name, jnp.result_type(leaf))
    ) / np.asarray(2, wide.get(name, jnp.result_type(leaf)))
    assert has_same_bits(out, jnp.asarray(expected)), name


def test_gradients_are_behind_a_barrier_under_jit_and_not_outside(monkeypatch):
  """On CPU, XLA would compute their end in each kernel: see test_cost.py."""
  unscale = lambda grads: ols.unscale_grads(grads, make_state(2.0))
  grads = np.ones(2, np.float32)
  assert "optimization_barrier" in str(jax.make_jaxpr(unscale)(grads))
  monkeypatch.delattr(jax.lax, "platform_dependent")
  assert unscale(grads).tolist() == [0.5, 0.5]


def test_scale_loss_keeps_or_widens_the_type_of_every_leaf():
  scale = 2.0**17  # beyond float16
  some_others = {k: NON_FLOATS[k] for k in ("int", "none")}
  got = ols.scale_loss(FLOATS | some_others, make_state(scale))
  assert has_same_bits(got["int"], NON_FLOATS["int"])
  assert got["none"] is None
  assert got["complex"].dtype == jnp.complex64
  assert has_same_bits(got["complex"], FLOATS["complex"] * scale)
  for name in ("f32", "f16", "bf16", "f8", "f8_5"):
    assert has_same_bits(got[name], FLOATS["f32"] * scale), name


@pytest.mark.parametrize("name", sorted(FLOATS.keys() - {"empty"}))
def test_all_finite_finds_one_bad_entry_in_a_leaf_of_any_type(name):
  for bad in (jnp.nan, jnp.inf, -jnp.inf):
    leaf = np.array(FLOATS[name])
    # e4m3fn has no infinity: a cast of one makes NaN of it.
    leaf.reshape(-1)[-1] = np.asarray(bad).astype(leaf.dtype)
    assert not jax.jit(ols.all_finite)(FLOATS | {name: leaf})


def test_all_finite_checks_floats_only():
  assert ols.all_finite(LEAF_GROUPS)
  for empty in ({}, None, [], NON_FLOATS):
    assert ols.all_finite(empty)


@pytest.mark.parametrize("differentiate", [ols.value_and_grad, ols.grad])
def test_the_returned_function_has_the_metadata_of_fun(differentiate):
  def a_loss(params, batch, *, temperature=1.0):
    """How wrong the model is."""
    return jnp.sum(params * batch) * temperature

  a_loss.about = "not a part of the function that is returned"
  fun = differentiate(a_loss, ols.FixedLossScale(2.0).init())
  assert fun.__name__ == "a_loss"
  assert fun.__doc__ == "How wrong the model is."
  assert inspect.signature(fun) == inspect.signature(a_loss)
  assert not hasattr(fun, "about")
  # A callable with neither name nor docstring can be differentiated, too.
  part = functools.partial(a_loss, temperature=2.0)
  differentiate(part, ols.FixedLossScale(2.0).init())(jnp.ones(2), jnp.ones(2))


def test_argnums_is_passed_on_only_if_it_is_given():
  given = []

  def using(fun, has_aux, **kwargs):
    given.append(kwargs)
    return jax.value_and_grad(fun, has_aux=has_aux, **kwargs)

  state = ols.FixedLossScale(2.0).init()
  for kwargs in ({}, {"argnums": 0}, {"argnums": (1,)}):
    ols.grad(lambda x, y: x * y, state, using=using, **kwargs)(1.0, 2.0)
  assert given == [{}, {"argnums": 0}, {"argnums": (1,)}]


@pytest.mark.parametrize("differentiate", [ols.value_and_grad, ols.grad])
@pytest.mark.parametrize(
  "using", [jax.grad, nnx.grad, eqx.filter_grad], ids=["jax", "nnx", "equinox"]
)
def test_a_using_function_without_a_value_is_detected(differentiate, using):
  total = lambda w: sum(map(jnp.sum, jax.tree.leaves(w)))
  fun = differentiate(total, ols.FixedLossScale(2.0).init(), using=using)
  message = r"using must return the value and the gradients.*got using = .*"
  message += r"Pass jax.value_and_grad, nnx.value.*eqx.filter_value_and_grad"
  for params in jnp.ones(2), [jnp.ones(2)] * 2:  # two gradients are a pair
    with pytest.raises(TypeError, match=message):
      fun(params)


ARGNUMS = [0, 1, -1, (0, 1), (1,), (1, 0)]


@parametrize_slow("argnums", [-1, (1, 0)], ARGNUMS)
@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_grad_returns_what_jax_does(has_aux, argnums):
  def fun(a, b, *, c=1.0):
    loss = jnp.sum(a["w"] ** 2) * b * c
    return (loss, {"aux": a, "none": None}) if has_aux else loss

  args = {"w": np.float32([1.0, 2.0])}, np.float32(3.0)
  for name in "value_and_grad", "grad":
    ours, jaxs = getattr(ols, name), getattr(jax, name)
    expected = jaxs(fun, argnums, has_aux)(*args, c=2.0)
    got = ours(fun, make_state(2.0**15), argnums, has_aux)(*args, c=2.0)
    assert has_same_bits(got, expected)


def test_value_and_grad_forwards_its_keywords():
  grad_fn = ols.grad(lambda x: x["f"] ** 2, make_state(2.0), allow_int=True)
  got = grad_fn({"f": jnp.float32(3.0), "i": jnp.int32(1)})
  assert got["f"] == 6
  assert got["i"].dtype == jax.dtypes.float0


def scaled(x):
  return ols.scale_loss(jnp.sum(x**2), make_state(8.0))


def with_a_jvp_rule():
  fun = jax.custom_jvp(scaled)
  fun.defjvp(lambda x, t: (scaled(*x), jnp.vdot(2 * x[0], t[0])))
  return fun


SCALED_TWICE = {
  "plain": lambda w: scaled(w),
  "jit": jax.jit(lambda w: scaled(w)),
  "checkpoint": jax.checkpoint(lambda w: scaled(w)),
  "vmap": lambda w: jnp.mean(jax.vmap(scaled)(w)),
  "scan": lambda w: jax.lax.scan(lambda c, x: (c + scaled(x), x), 0.0, w)[0],
  "cond": lambda w: jax.lax.cond(w[0] > 0, scaled, jnp.sum, w),
  "custom_jvp": with_a_jvp_rule(),
  "custom_vjp": custom_rules.add_recomputing_vjp(scaled),
  "autocast": ols.autocast(lambda w: scaled(w[None] @ jnp.ones((3, 2)))),
  "behind another gradient": lambda w: scaled(w - 0.1 * jax.grad(scaled)(w)),
  "in an inner one of ours": lambda w: jnp.sum(
    jax.vjp(ols.grad(scaled, make_state(2.0)), w)[0]
  ),
}


@pytest.mark.parametrize(
  ("name", "using"),
  [
    *((name, jax.value_and_grad) for name in SCALED_TWICE),
    ("jit", nnx.value_and_grad),
    ("jit", eqx.filter_value_and_grad),
  ],
  ids=[*SCALED_TWICE, "nnx", "equinox"],
)
def test_a_loss_that_is_scaled_twice_says_which_scale_to_drop(name, using):
  differentiated = ols.grad(SCALED_TWICE[name], make_state(2.0), using=using)
  with pytest.raises(RuntimeError, match="Remove scale_loss from "):
    jax.jit(differentiated)(np.ones(3, np.float32))
  # Nothing is left behind.
  scaled_grad = jax.jit(jax.grad(scaled))
  assert scaled_grad(np.ones(3, np.float32)).tolist() == [16.0] * 3


SCALED_BY_HAND = {
  "in a jit": lambda w: jax.jit(jax.grad(scaled))(w),
  "in a vmap": lambda w: jax.vmap(jax.grad(scaled))(w),
  "of autocast": lambda w: jax.grad(ols.autocast(scaled))(w),
  "vjp": lambda w: jax.vjp(scaled, w)[1](1.0)[0],
  "jvp": lambda w: jax.jvp(scaled, (w,), (w,))[1] / jnp.vdot(w, w) * w,
  "jacfwd": lambda w: jax.jacfwd(scaled)(w),
  "nnx": lambda w: nnx.grad(scaled)(w),
}


@parametrize_slow("name", ["in a jit"], SCALED_BY_HAND)
@pytest.mark.filterwarnings("ignore:autocast had no effect")
def test_a_loss_may_hold_a_gradient_that_is_scaled_by_hand(name):
  """A gradient penalty, or a step of an inner loop, with its own scale."""

  def penalty(w):
    grads = SCALED_BY_HAND[name](w)
    return jnp.sum(ols.unscale_grads(grads, make_state(8.0)) ** 2)

  w = np.float32([1.0, 2.0])
  calls = ols.grad(penalty, make_state(2.0)), jax.grad(penalty)
  for grads in jax.jit(lambda w: [call(w) for call in calls])(w):
    np.testing.assert_allclose(grads, 8 * w, rtol=1e-6)


def test_scaling_by_hand_is_free_in_rules_and_in_other_threads():
  found = []

  @jax.custom_vjp
  def layer(w):
    call = lambda: found.append(jax.grad(scaled)(jnp.ones(())))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return w**2

  there = lambda g: ols.scale_loss(g, make_state(8.0))
  back = lambda g: ols.unscale_grads(g, make_state(8.0))
  layer.defvjp(lambda w: (layer(w), w), lambda w, g: (back(there(g)) * 2 * w,))
  assert ols.grad(layer, make_state(2.0))(jnp.float32(3.0)) == 6
  assert ols.grad(jax.jit(layer), make_state(2.0))(jnp.float32(3.0)) == 6
  assert set(map(float, found)) == {16.0}


def test_a_function_without_a_signature_is_differentiated():
  with pytest.raises(ValueError, match="signature"):
    inspect.signature(max)
  assert ols.grad(max, make_state(8.0))((np.float32(3),)) == (1,)


DTYPES = [
  *("float16", "bfloat16", "float32", "float64", "complex64"),
  *("float8_e5m2", "float8_e4m3fn"),
]
BAD = [np.nan, np.inf, -np.inf]
FAULTS = {
  "sums": _grads._sum_indicator,
  "elements": _grads._elementwise_indicator,
  "counts": _grads._count_indicator,
}
WAYS = [*((way, None) for way in FAULTS), ("sums", 2.0**-15), ("counts", 0.3)]


def test_cpu_and_other_platforms_use_different_finiteness_checks(monkeypatch):
  """The checks are those below. test_compilers.py compiles them."""
  taken = []

  def platform_dependent(*args, cpu, default):
    taken.append((cpu, default))
    return cpu(*args)

  monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
  jax.jit(ols.all_finite).trace(jnp.zeros(3))
  jax.jit(lambda x: _grads.all_finite_by_sum([x])).trace(jnp.zeros(3))
  elements, sums, counts = (FAULTS[k] for k in ("elements", "sums", "counts"))
  faults = [tuple(way.args[0] for way in ways) for ways in taken]
  assert faults == [(elements, counts), (sums, counts)]


@functools.partial(jax.jit, static_argnums=0)
def is_finite(way, leaves, factor):
  return _grads._indicators_sum_to_zero(FAULTS[way], leaves, factor)


@pytest.mark.parametrize("way, factor", WAYS)
@parametrize_slow("dtype", ["float32"], DTYPES)
def test_each_check_finds_a_nonfinite_entry_at_any_index(dtype, way, factor):
  with jax.enable_x64(dtype == "float64"):
    info = jnp.finfo(dtype)
    tiny = info.smallest_subnormal
    # The last are no overflow, either.
    ends = [info.max, -info.max, info.tiny, tiny, -tiny, 0.0, -0.0]
    leaves = [
      *(np.linspace(-1, 1, n).astype(dtype) for n in (7, 4099, 100_003, 1)),
      *(np.array([x], dtype) for x in ends),
      np.zeros((0, 3), dtype),
    ]
    factor = factor and np.float32(factor)
    assert is_finite(way, leaves, factor)
    cases = [
      [(number, index, value)]
      for number, leaf in enumerate(leaves[:4])
      # XLA's maximum on CPU loses a NaN in leaves of some 4,000 entries.
      for index in {0, leaf.size // 2, leaf.size - 1}
      for value in BAD
    ]
    # Nor do two hide each other, whose sum is a NaN.
    both = [(0, 0, np.inf), (0, 1, -np.inf)], [(0, 0, np.inf), (3, 0, -np.inf)]
    cases += [*both, *([[(0, 0, 1 + 1j * np.inf)]] * (dtype == "complex64"))]
    for case in cases:
      bad = [leaf.copy() for leaf in leaves]
      for number, index, value in case:
        # e4m3fn has no infinity: a cast of one makes NaN of it.
        bad[number][index] = np.asarray(value).astype(dtype)
      assert not is_finite(way, bad, factor), case


def test_the_check_by_count_has_no_limit_where_a_sum_overflows():
  large = [np.full(1_000_000, 1e33, np.float32)]
  assert is_finite("counts", large, None)
  assert not is_finite("sums", large, None)
  assert is_finite("counts", large, np.float32(2.0**-15))


@pytest.mark.slow
def test_the_check_by_count_is_exact_for_many_leaves():
  leaves = [np.zeros(2, "f")] * 30 + [np.full(20_000_000, np.inf, "f")]
  assert not is_finite("counts", leaves[::-1], None)
  leaves[-1] = np.float32([0.0, np.nan])
  assert not is_finite("counts", leaves, None)


@pytest.mark.parametrize("way", ["sums", "counts"])
@parametrize_slow("dtype", ["float32"], ["float16", "bfloat16", "float32"])
def test_a_multiplication_that_overflows_is_found(dtype, way):
  """With a scale below 1, of an entry that is finite."""
  largest = np.array([jnp.finfo(dtype).max], dtype)
  factor = np.float32(2.0**127 if dtype == "float16" else 2)
  assert is_finite(way, [largest], np.float32(1))
  assert not is_finite(way, [largest], factor)
  assert not is_finite(way, [-largest], factor)
