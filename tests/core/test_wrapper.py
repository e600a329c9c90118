"""The transformation: the numbers of a step, its options and arguments.

Skipped steps are in test_skips.py.
"""

import functools
import itertools

from helpers import parametrize_slow
from helpers.bits import has_same_bits
from helpers.leaves import FLOATS, LEAF_GROUPS, NON_FLOATS
from helpers.policy_models import AmaxRecorder
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import _arrays, _grad_stats

NAN, INF = float("nan"), float("inf")
SGD = ols.with_loss_scaling(optax.sgd(1.0))


def eagerly(fun):
  return fun


jit_or_slow_eager = parametrize_slow("jit", [jax.jit], [jax.jit, eagerly])


def run_step(tx, grads, params=None, jit=jax.jit, **kwargs):
  def step(grads, params):
    state = tx.init(grads if params is None else params)
    return tx.update(grads, state, params, **kwargs)

  return jit(step)(grads, params)


@functools.cache
def make_step(tx):
  def step(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step)


# Sizes: SGD shows a wrong factor, Adam is blind to one.


def test_the_update_on_a_growth_step_equals_the_previous_update():
  """Unscaling with the adjusted scale halves the gradient of a growth step."""
  for grads_are_scaled in (False, True):
    tx = ols.with_loss_scaling(
      optax.sgd(1.0),
      ols.DynamicLossScale(4.0, growth_interval=2),
      grads_are_scaled=grads_are_scaled,
    )
    w = np.float32(1.0)
    state, update = tx.init(w), jax.jit(tx.update)
    for expected_scale in (4, 8, 8, 16):
      scale = ols.get_loss_scale_state(state).loss_scale
      grad = 3 * scale if grads_are_scaled else np.float32(3)
      updates, state = update(grad, state, w)
      assert updates == -3
      assert ols.get_loss_scale_state(state).loss_scale == expected_scale


def test_unscaling_rounds_a_gradient_once():
  dtypes = "bfloat16", "float16", "float32"
  grads = {x: np.linspace(0.5, 2, 100).astype(x) for x in dtypes}
  tx = ols.with_loss_scaling(optax.sgd(-1.0), 3.01, grads_are_scaled=True)
  updates, _ = run_step(tx, grads)
  unscaled = ols.unscale_grads(grads, tx.init(grads))
  for dtype in dtypes:
    reciprocal = np.float32(1) / np.float32(3.01)
    expected = np.float32(grads[dtype]) * reciprocal
    if dtype == "bfloat16":
      expected = expected.astype(dtype)
    assert has_same_bits(updates[dtype], expected)
    # Some versions of XLA multiply by the reciprocal where they are to divide.
    assert unscaled[dtype].dtype == expected.dtype
    found, expected = np.float32(unscaled[dtype]), np.float32(expected)
    rtol = 0 if dtype == "bfloat16" else 2.0**-22
    np.testing.assert_allclose(found, expected, rtol=rtol)


NORMS = None, 1e6, 0.5
FLOAT64 = [
  ("float64", *case) for case in itertools.product(NORMS, [jax.jit, eagerly])
] + [("complex128", norm, jax.jit) for norm in NORMS]


@parametrize_slow("case", FLOAT64[:1], FLOAT64)
def test_update_unscales_float64_as_exactly_as_unscale_grads(case):
  """By a scale whose reciprocal float32 rounds."""
  dtype, max_norm, jit = case
  with jax.enable_x64(True):
    scaled = np.linspace(1, 10, 101).astype(dtype)
    if max_norm is None:
      scaled[0] = 1e300
    options = {"grads_are_scaled": True, "max_norm": max_norm}
    tx = ols.with_loss_scaling(optax.sgd(-1.0), 1000.0, **options)
    state = tx.init(scaled)  # Not a constant, whose reciprocal XLA would use.
    updates, _ = jit(tx.update)(scaled, state, scaled)
    expected = np.asarray(ols.unscale_grads(scaled, state))
    clip = min(1.0, max_norm / np.linalg.norm(expected)) if max_norm else 1.0
    # The norm is float32.
    rtol = 1e-7 if clip < 1 else 0
    np.testing.assert_allclose(updates, expected * clip, rtol=rtol, atol=0)


# Gradients that stay finite when they are unscaled, and ones that do not.
UNSCALED_TO_INF = [
  (jnp.float32, 2.0**-80, 1e14, 1e15),
  # Finite in float32, and beyond bfloat16.
  (jnp.bfloat16, 4 / 3.4e38, 3.96875, 4.0),
  (jnp.bfloat16, 2.0**-80, 1e14, 1e15),
  (jnp.complex64, 2.0**-80, 1e14j, 1e15j),
  (jnp.float16, 2.0**-120, 200.0, 300.0),
  (jnp.float8_e4m3fn, 2.0**-120, 192.0, 256.0),
]


@parametrize_slow("case", UNSCALED_TO_INF[:2], UNSCALED_TO_INF, ids=str)
@parametrize_slow("max_norm", [None], [None, 2.0**120])
def test_a_finite_gradient_that_unscales_to_inf_is_skipped(case, max_norm):
  """torch tests the scaled gradients, and applies the inf."""
  dtype, scale, large, largest = case
  options = {"grads_are_scaled": True, "max_norm": max_norm}
  tx = ols.with_loss_scaling(optax.sgd(2.0**-126), scale, **options)
  w = np.ones(2, np.complex64 if dtype == jnp.complex64 else np.float32)
  state = tx.init(w)
  for bad in ([largest, -largest], [0.0, largest]):
    new, state = make_step(tx)(np.array(bad, dtype), state, w)
    assert has_same_bits(new, w)
    assert not state.loss_scale_state.last_finite
  new, state = make_step(tx)(np.array([large, 0.0], dtype), state, w)
  assert state.loss_scale_state.last_finite
  assert np.isfinite(new).all()


# The value of each update, and whether the dtype of the params has it.
UPDATES = [
  ("float16", -1e6, False),  # becomes -inf
  ("float16", 65504.0, True),
  ("float8_e4m3fn", 1e3, False),  # becomes NaN: the dtype has no inf
  ("bfloat16", 3.4028e38, False),  # rounds up to inf
  ("float32", 1e300, False),
  ("float32", NAN, False),
  ("float64", 1e300, True),
]


@jit_or_slow_eager
@parametrize_slow("case", UPDATES[:1], UPDATES, ids=str)
def test_check_updates_checks_the_updates_in_the_dtype_of_the_params(case, jit):
  dtype, value, applied = case
  with jax.enable_x64(value == 1e300):
    full = lambda u, params: jnp.full(u.shape, value, jnp.result_type(value))
    inner = optax.chain(optax.trace(0.5), optax.stateless(full))
    tx = ols.with_loss_scaling(inner, check_updates=True)
    w = np.ones(3, dtype)
    updates, new = run_step(tx, w, w, jit)
    assert new.loss_scale_state.last_finite == applied
    start = tx.init(w).inner_state
    assert has_same_bits(new.inner_state, start) == (not applied)
    assert has_same_bits(updates, np.full(3, value if applied else -0.0, dtype))
    _, new = run_step(ols.with_loss_scaling(inner), w, w, jit)
    assert new.loss_scale_state.last_finite  # The gradients alone are checked.


FLAGS = [
  *((x, True) for x in (True, 2, np.int32(2), np.uint8(4), np.int32(-1))),
  *((x, True) for x in (0.5, INF, 1j)),
  *((x, False) for x in (np.bool_(False), 0, np.float16(0.0), -0.0, NAN, 0j)),
]
# `jit` itself refuses or rounds these, if they are its arguments.
LARGE_FLAGS = [2**40, -(2**2000), np.int64(2**40), np.float64(1e-300), 1e300]


def test_a_number_passed_as_grads_finite_counts_by_its_truth_value():
  """A NaN is no answer, and counts as a no."""
  as_flag = functools.partial(_grad_stats._as_flag, "grads_finite")
  as_flags = jax.jit(lambda flags: [as_flag(flag) for flag in flags])
  flags, expected = map(list, zip(*FLAGS, strict=True))
  assert as_flags(flags) == expected
  assert [as_flag(flag) for flag in flags] == expected
  assert all(as_flag(flag) for flag in LARGE_FLAGS)


def test_a_step_is_applied_only_if_grads_and_grads_finite_say_so():
  w = np.ones(2, np.float32)
  state, update = SGD.init(w), jax.jit(SGD.update)
  for grads, flag in itertools.product([w, w * INF], [True, False]):
    _, after = update(grads, state, w, grads_finite=flag)
    assert after.loss_scale_state.last_finite == (flag and grads is w)


@pytest.mark.parametrize(
  "argument, value, error",
  [
    ("grads_finite.*jnp.all", jnp.array([True, True]), ValueError),
    ("grads_finite.*jnp.all", np.ones((1, 1)), ValueError),
    ("grads_finite.*jnp.all", [True, False], TypeError),
    ("grads_finite", "yes", TypeError),
    ("grads_finite", None, TypeError),
    ("grads_finite", {}, TypeError),
    ("grads_finite", jax.random.key(0), TypeError),
    ("grads_amax", np.ones(2, np.float32), ValueError),
    ("grads_amax", [1.0], TypeError),
    ("grads_amax", "1", TypeError),
    ("grads_amax", jax.random.key(0), TypeError),
  ],
  ids=repr,
)
def test_grads_finite_and_grads_amax_must_be_scalars(argument, value, error):
  w = np.ones(2, np.float32)
  argument, _, hint = argument.partition(".*")
  jitted = [] if isinstance(value, str) else [jax.jit(SGD.update)]
  for update in [SGD.update, *jitted]:
    with pytest.raises(error, match=f"{argument} must be a single.*{hint}"):
      update(w, SGD.init(w), w, **{argument: value})


AMAX_RECORDER = ols.with_loss_scaling(optax.sgd(1.0), AmaxRecorder())
LARGEST = float(jnp.finfo(jnp.float32).max)
MAGNITUDES = [
  *((16.0, 16.0), (-16, 16.0), (np.float16(0.5), 0.5), (True, 1.0)),
  *((np.uint8(16), 16.0), (16j, 16.0), (3 + 4j, 5.0), (-INF, INF)),
]
LARGE_MAGNITUDES = [
  *((2**40, 2.0**40), (np.int64(-(2**40)), 2.0**40), (1e-300, 0.0)),
  # As a gradient in float64, these are finite.
  *((2**2000, LARGEST), (np.float64(1e300), LARGEST)),
]


def test_grads_amax_counts_by_its_magnitude():
  as_magnitude = functools.partial(_grad_stats._as_magnitude, "grads_amax")
  as_magnitudes = jax.jit(lambda amaxes: [as_magnitude(x) for x in amaxes])
  amaxes, expected = map(list, zip(*MAGNITUDES, strict=True))
  assert as_magnitudes(amaxes) == expected
  for amax, magnitude in MAGNITUDES + LARGE_MAGNITUDES:
    assert as_magnitude(amax) == magnitude
  assert np.isnan(as_magnitude(NAN))


def test_the_policy_sees_the_larger_of_grads_amax_and_the_gradients():
  sgd = optax.sgd(1.0)
  tx = ols.with_loss_scaling(sgd, AmaxRecorder(), grads_are_scaled=True)
  state, update = ols.set_loss_scale(tx.init(0.0), 4.0), jax.jit(tx.update)
  # 8 with the scale in it, 2 without: grads_amax is without.
  grads = np.float32([8.0, -4.0])
  for amax, seen in [(16.0, 16), (0.5, 2), (NAN, 2), (None, 2)]:
    updates, after = update(grads, state, grads_amax=amax)
    assert updates.tolist() == [-2.0, 1.0]
    assert after.loss_scale_state.policy_state == seen


GRADS = {
  "negative": (np.float32([1.0, -8.0]), 8.0),
  "positive": (np.float32([8.0, -1.0]), 8.0),
  "complex": (np.complex64([1 + 2j, 3 - 8j]), 8.0),
  "float16": (np.float16([-0.25, 0.125]), 0.25),
  "float8": (np.array([-0.25, 0.125], jnp.float8_e5m2), 0.25),
  "tree": ([np.float32(x) for x in ([], [-2.0], [1.0])], 2.0),
  "zeros": (np.zeros(3, np.float32), 0.0),
  # The largest float32 number, if it is beyond.
  "float64": ([np.full(3, x) for x in (-1e300, 1j * 1e300)], LARGEST),
}


def test_the_largest_magnitude_covers_both_signs_and_complex_parts():
  @jax.jit
  def update_with_each(grads):
    return {
      name: AMAX_RECORDER.update(x, AMAX_RECORDER.init(x))[1].loss_scale_state
      for name, x in grads.items()
    }

  with jax.enable_x64(True):
    grads = {name: grads for name, (grads, _) in GRADS.items()}
    found = update_with_each(grads)
  for name, (_, amax) in GRADS.items():
    assert found[name].last_finite
    assert found[name].policy_state == amax, name


@pytest.mark.parametrize("loss_scale", [8.0, "dynamic", "headroom"])
def test_the_largest_gradient_is_traced_only_if_the_policy_needs_it(loss_scale):
  tx, w = ols.with_loss_scaling(optax.sgd(1.0), loss_scale), np.float32([1.0])
  jaxpr = str(jax.make_jaxpr(tx.update)(w, tx.init(w)))
  assert ("reduce_max" in jaxpr) == (loss_scale == "headroom")


def test_a_subclass_of_a_policy_receives_the_largest_gradient():
  """The policies themselves ignore it, so it isn't computed for them."""

  class Recorder(ols.DynamicLossScale):
    def adjust(self, state, grads_finite, *, grads_amax=None):
      state = super().adjust(state, grads_finite)
      return state._replace(loss_scale=grads_amax)

  tx = ols.with_loss_scaling(optax.sgd(1.0), Recorder())
  _, state = run_step(tx, np.float32([-4.0, 2.0]))
  assert state.loss_scale_state.loss_scale == 4


# More arrays than XLA combines in one kernel on CPU.

MANY = [np.float32(0.1 * (-1) ** i * (i + 1) * np.ones(3)) for i in range(50)]


PLACES = list(itertools.product([None, 1e6], [0, 7, 8, 9, 15, 16, 49]))


@parametrize_slow("case", [(1e6, 8)], PLACES, ids=str)
def test_the_largest_gradient_or_a_nan_may_be_in_any_of_many_arrays(case):
  max_norm, number = case
  tx = ols.with_loss_scaling(optax.sgd(1.0), AmaxRecorder(), max_norm=max_norm)
  update, state = jax.jit(tx.update), tx.init(MANY)
  for value in (-100, NAN, INF, -INF):
    grads = [x.copy() for x in MANY]
    grads[number][1] = value
    updates, after = update(grads, state)
    if value == -100:
      assert after.loss_scale_state.policy_state == 100
    else:
      assert not any(np.any(x) for x in updates)
    assert after.loss_scale_state.last_finite == (value == -100)


def test_scalars_are_combined_in_their_order_however_many_there_are():
  """A barrier between some of them changes no bit of a sum."""
  values = list(np.random.default_rng(0).normal(size=50).astype("f") * 1000)
  zero = np.float32(0)
  in_order = np.float32(0)
  for value in values:
    in_order += np.float32(value)
  add = jax.lax.add
  assert _arrays.fold_by_platform(add, values, zero) == in_order
  assert _arrays.fold_in_chunks(add, values, zero) == in_order
  jitted = jax.jit(lambda x: _arrays.fold_by_platform(add, x, zero))
  assert jitted(values) == in_order


TURNS = [([1.0, 2.0], lambda g: g * 1j), ([1.0, 2j], jnp.real)]


@pytest.mark.parametrize("w, turn", TURNS, ids=["complex", "real"])
def test_an_update_is_never_made_complex_or_real_by_the_wrapper(w, turn):
  inner = optax.stateless(lambda updates, params: turn(updates))
  tx = ols.with_loss_scaling(inner)
  w = np.array(w)
  updates, _ = run_step(tx, w, w)
  bare, _ = run_step(inner, w, w)
  np.testing.assert_array_equal(updates, bare)
  assert updates.dtype == bare.dtype != w.dtype


def test_the_inner_optimizer_of_a_skipped_step_receives_float32_zeros():
  seen = []

  def spy(updates, params):
    args = *updates, *params
    jax.debug.callback(lambda *args: seen.extend(map(np.asarray, args)), *args)
    return updates

  tx, half = ols.with_loss_scaling(optax.stateless(spy)), np.ones(3, np.float16)
  run_step(tx, [half * NAN, half], [half, half])
  jax.effects_barrier()
  zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
  assert has_same_bits(seen, [zeros, zeros, ones, ones])


def test_a_scale_inside_multi_steps_warns():
  tx = optax.MultiSteps(ols.with_loss_scaling(optax.sgd(1.0)), 2)
  state = tx.init(np.zeros(2, np.float32))
  with pytest.warns(UserWarning, match=r"with_loss_scaling\(optax.MultiSteps"):
    ols.grad(jnp.sum, {"train": state})
  outside = ols.with_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2))
  ols.grad(jnp.sum, outside.init(np.zeros(2, np.float32)))


@parametrize_slow("is_scaled", [True], [True, False])
def test_max_norm_clips_by_the_global_norm(is_scaled):
  @jax.jit
  def clip(max_norm, grads):
    options = {"grads_are_scaled": is_scaled, "max_norm": max_norm}
    tx = ols.with_loss_scaling(optax.sgd(-1.0), 8.0, **options)
    updates, state = tx.update(grads, tx.init(grads))
    return updates, state.loss_scale_state.last_finite

  factor = 8 if is_scaled else 1
  true = [np.float32([[3.0, -0.0], [1.0, 2.0]]), np.float32([-7.0])]
  norm = np.sqrt(9 + 1 + 4 + 49)
  for max_norm in (2.0**-126, 0.5, 1e6, 2.0**127):
    updates, finite = clip(np.float32(max_norm), [factor * x for x in true])
    assert finite
    for update, x in zip(updates, true, strict=True):
      clipped = min(1, max_norm / norm) * x
      np.testing.assert_allclose(update, clipped, rtol=1e-6, atol=2.0**-126)
    updates, finite = clip(np.float32(max_norm), [0 * x for x in true])
    assert finite
    assert not any(np.any(update) for update in updates)


def test_max_norm_clips_float16_and_complex_gradients_by_their_true_norm():
  grads = {
    "a": np.full(10_000, 300.0, np.float16),
    "c": np.full(10_000, 300j, np.complex64),
  }
  tx = ols.with_loss_scaling(optax.identity(), max_norm=1.0)
  updates, _ = run_step(tx, grads)
  norm = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in updates.values()))
  np.testing.assert_allclose(norm, 1.0, rtol=1e-4)


def test_loss_scale_takes_a_policy_a_string_or_a_number():
  first_scales = [
    ("dynamic", 2.0**14),
    ("headroom", 2.0**7),
    (ols.DynamicLossScale(8.0), 4),
    *((x(128), 128) for x in (int, float, np.float32, np.int64, jnp.float32)),
  ]

  @jax.jit
  def overflow_with_each(grad):
    txs = [ols.with_loss_scaling(optax.sgd(1.0), x) for x, _ in first_scales]
    states = [tx.update(grad, tx.init(grad))[1] for tx in txs]
    return [state.loss_scale_state.loss_scale for state in states]

  found = overflow_with_each(np.float32(INF))
  assert found == [scale for _, scale in first_scales]


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode()], ids=repr)
def test_a_leaf_of_the_params_may_have_no_gradient(nothing):
  # As in optim.update(grads, opt_state, model) of an Equinox model.
  params = {"w": np.ones(2, np.float16), "static": np.ones(3, np.float32)}
  grads = {"w": np.ones(2, np.float32), "static": nothing}
  updates, _ = run_step(SGD, grads, params)
  assert updates["static"] == nothing
  assert has_same_bits(updates["w"], -np.ones(2, np.float16))


def test_any_object_with_init_and_update_is_an_optimizer():
  """And what its update does not take is not given to it."""

  class Halve:
    def init(self, params):
      return ()

    def update(self, updates, state, params=None):
      return jax.tree.map(lambda g: g / 2, updates), state

  tx = ols.with_loss_scaling(Halve())
  updates, _ = run_step(tx, np.float32(3.0), value=3.0)
  assert updates == 1.5


@pytest.mark.parametrize(
  "options",
  [
    {"max_norm": 1e9, "check_updates": True},
    pytest.param({"grads_are_scaled": True}, marks=pytest.mark.slow),
  ],
  ids=str,
)
@jit_or_slow_eager
def test_every_leaf_type_passes_through_a_step(options, jit):
  tx = ols.with_loss_scaling(optax.identity(), 1.0, **options)
  update = jit(tx.update)
  updates, state = update(LEAF_GROUPS, tx.init(LEAF_GROUPS), LEAF_GROUPS)
  assert state.loss_scale_state.last_finite
  as_array = lambda x: jnp.asarray(x) if isinstance(x, (int, float)) else x
  expected = jax.tree.map(as_array, LEAF_GROUPS)
  assert has_same_bits(updates, expected)

  bad = LEAF_GROUPS | {"floats": FLOATS | {"f16": np.float16([INF, 1])}}
  updates, state = update(bad, tx.init(LEAF_GROUPS), LEAF_GROUPS)
  assert not state.loss_scale_state.last_finite
  # Updates that are added to params are zero; other leaves keep their value.
  for leaf in jax.tree.leaves(updates["floats"]):
    assert (np.asarray(leaf) == 0).all()
  assert not updates["others"]["int"].any()
  for name in ("bool", "float0", "key", "_overwrite_with_gradient"):
    assert has_same_bits(updates["others"][name], NON_FLOATS[name])
