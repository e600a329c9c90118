"""The transformation: what a step does, and what a skipped one leaves alone."""

import functools
import itertools

from helpers import mark_slow_params
from helpers.bits import has_same_bits
from helpers.leaves import FLOATS, LEAF_GROUPS, NON_FLOATS
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols
from optax_lossscale import _arrays

NAN, INF = float("nan"), float("inf")
SGD = ols.with_loss_scaling(optax.sgd(1.0))


def make_params(dtype=jnp.float32):
  return {
    "w": np.array([[1.0, -2.0, 0.5], [-0.0, 0.0, 4.0]], dtype),
    "b": np.array([-0.0, 3.0], dtype),
  }


def make_grads(dtype=jnp.float32):
  return jax.tree.map(lambda x: (x * 0.25 + 0.5).astype(dtype), make_params())


@functools.cache
def make_step(tx):
  return jax.jit(
    lambda g, s, p, **extra: _apply(p, *tx.update(g, s, p, **extra))
  )


def _apply(params, updates, state):
  return optax.apply_updates(params, updates), updates, state


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


def test_both_idioms_give_the_true_gradient_to_the_optimizer():
  """DeepSpeed divides gradients that were never multiplied."""

  def loss_fn(w):
    return jnp.sum(w.astype(jnp.float16) ** 2).astype(jnp.float32)

  w = np.float32([0.5, -0.25])
  tx = ols.with_loss_scaling(optax.sgd(1.0), 2.0**10)
  state = tx.init(w)
  updates, _ = jax.jit(tx.update)(
    jax.jit(ols.grad(loss_fn, state))(w), state, w
  )
  assert updates.tolist() == [-1.0, 0.5]

  tx = ols.with_loss_scaling(optax.sgd(1.0), 2.0**10, grads_are_scaled=True)
  by_hand = jax.jit(jax.grad(lambda w: ols.scale_loss(loss_fn(w), state)))(w)
  updates, _ = jax.jit(tx.update)(by_hand, state, w)
  assert updates.tolist() == [-1.0, 0.5]


def test_float16_gradients_do_not_destroy_adam():
  """In float16, Adam gives -inf at 1e-4, NaN at 0 and nu = inf at 300."""
  params = {"w": np.zeros(4, np.float16)}
  grads = {"w": np.array([1e-4, 0.0, 300.0, 2.0**-24], np.float16)}
  tx = ols.with_loss_scaling(optax.adam(1e-2))
  state = tx.init(params)
  assert state.inner_state[0].nu["w"].dtype == jnp.float32
  updates, state = make_step(tx)(grads, state, params)[1:]
  reference = optax.adam(1e-2)
  wide = {"w": grads["w"].astype(jnp.float32)}
  expected, _ = reference.update(wide, reference.init(wide), wide)
  assert updates["w"].dtype == jnp.float16
  np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-3)
  assert ols.all_finite(state)


# Finiteness.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_unscaling_rounds_a_gradient_once(dtype):
  tx = ols.with_loss_scaling(optax.sgd(-1.0), 3.01, grads_are_scaled=True)
  grads = np.linspace(0.5, 2, 100).astype(dtype)
  updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
  reciprocal = np.float32(1) / np.float32(3.01)
  expected = np.asarray(grads, np.float32) * reciprocal
  if dtype == jnp.bfloat16:
    expected = expected.astype(dtype)
  assert has_same_bits(updates, expected)
  # Some versions of XLA multiply by the reciprocal where they are to divide.
  unscaled = ols.unscale_grads(grads, tx.init(grads))
  assert unscaled.dtype == expected.dtype
  a_bit = 0 if dtype == jnp.bfloat16 else 2.0**-22
  np.testing.assert_allclose(
    np.float32(unscaled), np.float32(expected), rtol=a_bit
  )


@pytest.mark.parametrize("scaled, factor", [(True, 0.25), (False, 1.0)])
def test_float64_gradients_keep_their_precision_and_range(scaled, factor):
  with jax.enable_x64(True):
    tx = ols.with_loss_scaling(optax.sgd(-1.0), 4.0, grads_are_scaled=scaled)
    grads = np.array([1 + 2.0**-50, 1e300])
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert updates.tolist() == [factor * (1 + 2.0**-50), factor * 1e300]
    assert state.loss_scale_state.last_finite


FLOAT64 = list(
  itertools.product(["float64", "complex128"], [None, 1e6, 0.5], [True, False])
)


@pytest.mark.parametrize(
  "case",
  mark_slow_params(
    [("float64", 0.5, True), ("complex128", None, True)], FLOAT64
  ),
  ids=str,
)
def test_update_unscales_float64_as_exactly_as_unscale_grads(case):
  """By a scale whose reciprocal float32 rounds."""
  dtype, max_norm, jitted = case
  with jax.enable_x64(True):
    scaled = np.linspace(1, 10, 101).astype(dtype)
    tx = ols.with_loss_scaling(
      optax.sgd(-1.0), 1000.0, grads_are_scaled=True, max_norm=max_norm
    )
    state = tx.init(scaled)
    update = jax.jit(tx.update) if jitted else tx.update
    updates, _ = update(scaled, state, scaled)
    expected = np.asarray(ols.unscale_grads(scaled, state))
    norm = np.linalg.norm(expected)
    clip = min(1.0, (max_norm or 1e6) / norm)
    # The norm is float32.
    rtol = 1e-7 if clip < 1 else 0
    np.testing.assert_allclose(updates, expected * clip, rtol=rtol, atol=0)


# Gradients that stay finite when they are unscaled, and ones that do not.
UNSCALED_TO_INF = [
  (jnp.float32, 2.0**-80, 1e14, 1e15),
  (jnp.bfloat16, 2.0**-80, 1e14, 1e15),
  # Finite in float32, and beyond bfloat16.
  (jnp.bfloat16, 4 / 3.4e38, 3.96875, 4.0),
  (jnp.complex64, 2.0**-80, 1e14j, 1e15j),
  (jnp.float16, 2.0**-120, 200.0, 300.0),
  (jnp.float8_e4m3fn, 2.0**-120, 192.0, 256.0),
]


@pytest.mark.parametrize(
  "dtype, scale, large, largest",
  [
    *(UNSCALED_TO_INF[i] for i in (0, 2, 4)),
    *(
      pytest.param(*UNSCALED_TO_INF[i], marks=pytest.mark.slow)
      for i in (1, 3, 5)
    ),
  ],
)
@pytest.mark.parametrize(
  "max_norm", [None, pytest.param(2.0**120, marks=pytest.mark.slow)]
)
def test_a_finite_scaled_gradient_that_unscales_to_inf_is_skipped(
  dtype, scale, large, largest, max_norm
):
  """torch tests the scaled gradients, and applies the inf."""
  tx = ols.with_loss_scaling(
    optax.sgd(2.0**-126), scale, grads_are_scaled=True, max_norm=max_norm
  )
  w = jnp.ones(2, jnp.complex64 if dtype == jnp.complex64 else jnp.float32)
  state = tx.init(w)
  for bad in ([largest, -largest], [0.0, largest]):
    new, _, state = make_step(tx)(np.array(bad, dtype), state, w)
    assert has_same_bits(new, w)
    assert not state.loss_scale_state.last_finite
  new, _, state = make_step(tx)(np.array([large, 0.0], dtype), state, w)
  assert state.loss_scale_state.last_finite
  assert ols.all_finite(new)


def test_a_nan_from_the_optimizer_is_found_with_check_updates():
  born = optax.stateless(lambda u, p: jax.tree.map(lambda x: jnp.log(x), u))
  inner = optax.chain(optax.trace(0.9), born)
  w = np.float32([1.0, 1.0])
  bad = np.float32([1.0, -1.0])
  plain = ols.with_loss_scaling(inner)
  new, _, state = make_step(plain)(bad, plain.init(w), w)
  assert jnp.isnan(new[1])
  checked = ols.with_loss_scaling(inner, check_updates=True)
  new, _, state = make_step(checked)(bad, checked.init(w), w)
  assert has_same_bits(new, w)
  assert has_same_bits(state.inner_state, checked.init(w).inner_state)
  assert state.loss_scale_state.total_notfinite == 1
  new, _, state = make_step(checked)(w, state, w)
  assert state.loss_scale_state.last_finite


def make_constant_optimizer(value, dtype=jnp.float32):
  """An optimizer whose every update is this number, in this dtype."""
  return optax.stateless(
    lambda updates, params: jax.tree.map(
      lambda g: jnp.full(g.shape, value, dtype), updates
    )
  )


@pytest.mark.parametrize("jitted", mark_slow_params([True], [True, False]))
@pytest.mark.parametrize(
  "dtype, value, applied",
  [
    ("float16", -1e6, False),  # becomes -inf
    ("float16", 65504.0, True),
    ("float8_e4m3fn", 1e3, False),  # becomes NaN: the dtype has no inf
    ("bfloat16", 3.4028e38, False),  # rounds up to inf
    ("float32", 1e300, False),
    ("float64", 1e300, True),
  ],
)
def test_check_updates_checks_the_updates_in_the_dtype_of_the_params(
  dtype, value, applied, jitted
):
  with jax.enable_x64(value == 1e300):
    update_of = make_constant_optimizer(value, jnp.result_type(value))
    inner = optax.chain(optax.trace(0.5), update_of)
    tx = ols.with_loss_scaling(inner, check_updates=True)
    w = np.ones(3, dtype)
    state = tx.init(w)
    update = jax.jit(tx.update) if jitted else tx.update
    updates, new = update(w, state, w)
    assert new.loss_scale_state.last_finite == applied
    assert has_same_bits(new.inner_state, state.inner_state) == (not applied)
    assert has_same_bits(updates, np.full(3, value if applied else -0.0, dtype))


@pytest.mark.parametrize("jitted", mark_slow_params([True], [True, False]))
@pytest.mark.parametrize(
  "applied, flags",
  [
    (True, [True, 2, np.int32(2), np.uint8(4), np.int32(-1), 0.5, INF, 1j]),
    (False, [np.bool_(False), 0, np.float16(0.0), -0.0, NAN, 0j]),
  ],
  ids=["applied", "skipped"],
)
def test_a_number_passed_as_grads_finite_counts_by_its_truth_value(
  applied, flags, jitted
):
  """A NaN is no answer, and counts as a no. No flag hides an overflow."""
  w = np.ones(2, np.float32)
  update = jax.jit(SGD.update) if jitted else SGD.update
  for flag in flags:
    for grads, finite in ((w, True), (w * INF, False)):
      _, state = update(grads, SGD.init(w), w, grads_finite=flag)
      expected = applied and finite
      assert state.loss_scale_state.last_finite == expected, flag


def test_a_number_that_int32_or_float32_cannot_hold_is_a_true_flag():
  """Jit itself refuses or rounds these, if they are its arguments."""
  flags = [2**40, -(2**2000), np.int64(2**40), np.float64(1e-300), 1e300]
  w = np.ones(2, np.float32)

  def update_with_each(state):
    return [SGD.update(w, state, w, grads_finite=flag)[1] for flag in flags]

  for state in jax.jit(update_with_each)(SGD.init(w)):
    assert state.loss_scale_state.last_finite


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


AMAXES = [
  *((16.0, 16.0), (-16, 16.0), (np.float16(0.5), 2.0), (0, 2.0), (None, 2.0)),
  *((True, 2.0), (np.uint8(16), 16.0), (16j, 16.0), (3 + 4j, 5.0)),
  *((NAN, 2.0), (np.float32(NAN), 2.0)),
]


@pytest.mark.parametrize(
  "jit", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)]
)
def test_the_policy_sees_the_larger_of_grads_amax_and_the_gradients(jit):
  tx = ols.with_loss_scaling(
    optax.sgd(1.0), AmaxRecorder(), grads_are_scaled=True
  )
  state = ols.set_loss_scale(tx.init(np.ones(2)), 4.0)

  @jit
  def update_with_each(amaxes):
    # 8 with the scale in it, 2 without: grads_amax is without.
    grads = np.float32([8.0, -4.0])
    return [tx.update(grads, state, grads_amax=x) for x in amaxes]

  found = update_with_each([amax for amax, _ in AMAXES])
  for (updates, after), (_, seen) in zip(found, AMAXES, strict=True):
    assert updates.tolist() == [-2.0, 1.0]
    assert after.loss_scale_state.policy_state == seen


LARGEST = float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize(
  "amax, seen",
  [
    *((2**40, 2.0**40), (np.int64(-(2**40)), 2.0**40), (1e-300, 2.0)),
    # As a gradient in float64, these are finite.
    *((2**2000, LARGEST), (np.float64(1e300), LARGEST), (-INF, INF)),
  ],
  ids=lambda x: f"{x!s:.9}",
)
def test_a_grads_amax_beyond_int32_or_float32_counts_by_its_size(amax, seen):
  state = AMAX_RECORDER.init(np.float32(1))
  update = functools.partial(AMAX_RECORDER.update, grads_amax=amax)
  for step in (update, jax.jit(update)):
    _, after = step(np.float32(2), state, np.float32(1))
    assert after.loss_scale_state.policy_state == seen


def test_a_float64_gradient_above_float32_counts_as_the_largest_float32():
  with jax.enable_x64():
    w = [np.full(3, x) for x in (-1e300, 1j * 1e300)]
    _, after = jax.jit(AMAX_RECORDER.update)(w, AMAX_RECORDER.init(w), w)
    assert after.loss_scale_state.last_finite
    assert after.loss_scale_state.policy_state == LARGEST


class AmaxRecorder:
  """A policy that remembers the largest gradient that it received."""

  def init(self):
    state = ols.FixedLossScale(1.0).init()
    return state._replace(policy_state=np.float32(0))

  def adjust(self, state, grads_finite, *, grads_amax=None):
    state = ols.FixedLossScale(1.0).adjust(state, grads_finite)
    return state._replace(policy_state=grads_amax)


AMAX_RECORDER = ols.with_loss_scaling(optax.sgd(1.0), AmaxRecorder())


def test_a_subclass_of_a_policy_receives_the_largest_gradient():
  """The policies themselves ignore it, so it isn't computed for them."""

  class Recorder(ols.DynamicLossScale):
    def adjust(self, state, grads_finite, *, grads_amax=None):
      state = super().adjust(state, grads_finite)
      return state._replace(loss_scale=grads_amax)

  tx = ols.with_loss_scaling(optax.sgd(1.0), Recorder())
  _, state = tx.update(
    np.float32([-4.0, 2.0]), tx.init(np.zeros(2, np.float32))
  )
  assert state.loss_scale_state.loss_scale == 4


# More arrays than XLA combines in one kernel on CPU.

MANY = [np.float32(0.1 * (-1) ** i * (i + 1) * np.ones(3)) for i in range(50)]


@pytest.mark.parametrize("number", mark_slow_params([8], [0, 7, 8, 16, 49]))
def test_the_largest_gradient_may_be_in_any_of_many_arrays(number):
  grads = [x.copy() for x in MANY]
  grads[number][2] = -100
  _, after = jax.jit(AMAX_RECORDER.update)(grads, AMAX_RECORDER.init(MANY))
  assert after.loss_scale_state.policy_state == 100


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


def test_each_member_of_a_population_clips_many_arrays_by_its_own_norm():
  tx = ols.with_loss_scaling(optax.sgd(1.0), max_norm=1.0)
  batch = [np.stack([g, 3 * g, g + INF]) for g in MANY]
  state = tx.init(MANY)
  updates, after = jax.jit(jax.vmap(lambda g: tx.update(g, state)))(batch)
  assert after.loss_scale_state.last_finite.tolist() == [True, True, False]
  alone, _ = jax.jit(tx.update)(MANY, state)
  for many, one in zip(updates, alone, strict=True):
    np.testing.assert_allclose(many[0], one, rtol=1e-6)
    np.testing.assert_allclose(many[1], one, rtol=1e-6)
    np.testing.assert_array_equal(many[2], 0)


# Skipping.


@pytest.mark.parametrize(
  "w, turn", [([1.0, 2.0], lambda g: g * 1j), ([1.0, 2j], jnp.real)]
)
def test_an_update_is_never_made_complex_or_real_by_the_wrapper(w, turn):
  inner = optax.stateless(lambda updates, params: turn(updates))
  tx = ols.with_loss_scaling(inner)
  w = jnp.array(w)
  updates, _ = tx.update(w, tx.init(w), w)
  bare, _ = inner.update(w, (), w)
  np.testing.assert_array_equal(updates, bare)
  assert updates.dtype == bare.dtype != w.dtype


def test_leaves_of_the_inner_state_that_are_not_arrays_keep_their_value():
  key = jax.random.key(3)
  leaves = {"n": 0, "flag": False, "k": key, "x": None, "m": optax.MaskedNode()}

  def update(updates, state, params=None):
    del params
    k = jax.random.split(state["k"])[0]
    return updates, state | {"n": state["n"] + 1, "flag": True, "k": k}

  w = np.ones(2, np.float32)
  for jitted in (True, False):
    # A name can be no argument of what is compiled.
    first = leaves if jitted else leaves | {"name": "mine"}
    inner = optax.GradientTransformation(lambda _, x=first: x, update)
    tx = ols.with_loss_scaling(inner)
    step = jax.jit(tx.update) if jitted else tx.update
    state = tx.init(w)
    _, skipped = step(w * NAN, state, w)
    assert has_same_bits(skipped.inner_state, state.inner_state)
    _, applied = step(w, state, w)
    assert (applied.inner_state["n"], applied.inner_state["flag"]) == (1, True)
    assert not has_same_bits(applied.inner_state["k"], state.inner_state["k"])
    assert applied.inner_state.get("name") == first.get("name")


def test_no_inner_optimizer_ever_sees_a_nan():
  seen = []

  def spy(updates, state, params=None):
    jax.debug.callback(lambda u: seen.append(np.asarray(u)), updates["w"])
    return updates, state

  inner = optax.chain(
    optax.GradientTransformation(lambda p: optax.EmptyState(), spy),
    optax.adam(0.1),
  )
  tx = ols.with_loss_scaling(inner)
  params, grads = make_params(), make_grads()
  grads["w"][-1, -1] = NAN
  make_step(tx)(grads, tx.init(params), params)
  jax.effects_barrier()
  assert len(seen) == 1
  assert (seen[0] == 0).all()


# The order of things.


def test_one_bad_micro_batch_costs_one_micro_batch_around_multi_steps():
  w = np.zeros(2, np.float32)
  good, bad = np.ones(2, np.float32), np.float32([NAN, 1.0])
  for inner in (
    optax.MultiSteps(optax.sgd(1.0), 2),
    optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
  ):
    tx = ols.with_loss_scaling(inner)
    params, state = w, tx.init(w)
    for grads in (good, bad, 3 * good):
      params, _, state = make_step(tx)(grads, state, params)
    assert params.tolist() == [-2.0, -2.0]
    assert state.inner_state.gradient_step == 1


def test_a_scale_inside_multi_steps_warns():
  tx = optax.MultiSteps(ols.with_loss_scaling(optax.sgd(1.0)), 2)
  state = tx.init(np.zeros(2, np.float32))
  with pytest.warns(UserWarning, match=r"with_loss_scaling\(optax.MultiSteps"):
    ols.grad(jnp.sum, {"train": state})
  outside = ols.with_loss_scaling(optax.MultiSteps(optax.sgd(1.0), 2))
  ols.grad(jnp.sum, outside.init(np.zeros(2, np.float32)))


# Options.


@pytest.mark.parametrize(
  "grads_are_scaled", mark_slow_params([True], [False, True])
)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_max_norm_clips_as_optax_does(grads_are_scaled, max_norm):
  params, grads = make_params(), make_grads()
  tx = ols.with_loss_scaling(
    optax.sgd(1.0),
    2.0**10,
    max_norm=max_norm,
    grads_are_scaled=grads_are_scaled,
  )
  bare = optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(1.0))
  expected, _ = jax.jit(bare.update)(grads, bare.init(params), params)
  if grads_are_scaled:
    grads = jax.tree.map(lambda x: x * 2.0**10, grads)
  got = make_step(tx)(grads, tx.init(params), params)[1]
  for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_max_norm_keeps_zeros():
  tx = ols.with_loss_scaling(optax.sgd(1.0), max_norm=1.0)
  w = np.zeros(3, np.float32)
  new, _, state = make_step(tx)(w, tx.init(w), w)
  assert state.loss_scale_state.last_finite
  assert not new.any()


def test_max_norm_clips_float16_and_complex_gradients_by_their_true_norm():
  grads = {
    "a": np.full(10_000, 300.0, np.float16),
    "c": np.full(10_000, 300j, np.complex64),
  }
  tx = ols.with_loss_scaling(optax.identity(), max_norm=1.0)
  updates = jax.jit(tx.update)(grads, tx.init(grads))[0]
  norm = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in updates.values()))
  np.testing.assert_allclose(norm, 1.0, rtol=1e-4)


def test_loss_scale_takes_a_policy_a_string_or_a_number():
  def first(loss_scale):
    tx = ols.with_loss_scaling(optax.sgd(1.0), loss_scale)
    _, state = jax.jit(tx.update)(np.inf, tx.init(0.0))
    return state.loss_scale_state.loss_scale.item()

  assert first("dynamic") == 2.0**14
  assert first("headroom") == 2.0**7
  assert first(ols.DynamicLossScale(8.0)) == 4
  for number in (128, 128.0, np.float32(128), np.float32(128), np.int64(128)):
    assert first(number) == 128


# Extra arguments.


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode()], ids=repr)
def test_a_leaf_of_the_params_may_have_no_gradient(nothing):
  # As in optim.update(grads, opt_state, model) of an Equinox model.
  params = {"w": np.ones(2, np.float16), "static": np.ones(3, np.float32)}
  grads = {"w": np.ones(2, np.float32), "static": nothing}
  updates, _ = SGD.update(grads, SGD.init(grads), params)
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
  updates, _ = tx.update(np.float32(3.0), tx.init(0.0), value=3.0)
  assert updates == 1.5


def test_with_loss_scaling_itself_can_be_injected():
  for loss_scale in (4.0, ols.DynamicLossScale(4.0)):
    tx = optax.inject_hyperparams(ols.with_loss_scaling)(
      inner=optax.sgd(1.0), loss_scale=loss_scale, max_norm=1.0
    )
    w = np.float32([3.0, 4.0])
    updates, state = jax.jit(tx.update)(w, tx.init(w), w)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)
    assert optax.tree.get(state, "max_norm") == 1
    _, state = jax.jit(tx.update)(w * INF, state, w)
    assert not ols.get_loss_scale_state(state).last_finite


# Leaves of every kind.


@pytest.mark.parametrize(
  "options",
  [
    {"max_norm": 1e9, "check_updates": True},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"grads_are_scaled": True}, marks=pytest.mark.slow),
  ],
  ids=str,
)
@pytest.mark.parametrize("jitted", mark_slow_params([True], [True, False]))
def test_every_leaf_type_passes_through_a_step(options, jitted):
  tx = ols.with_loss_scaling(optax.identity(), 1.0, **options)
  update = jax.jit(tx.update) if jitted else tx.update
  updates, state = update(LEAF_GROUPS, tx.init(LEAF_GROUPS), LEAF_GROUPS)
  assert state.loss_scale_state.last_finite
  expected = jax.tree.map(
    lambda x: jnp.asarray(x) if isinstance(x, (int, float)) else x, LEAF_GROUPS
  )
  assert has_same_bits(updates, expected)

  bad = LEAF_GROUPS | {"floats": FLOATS | {"f16": FLOATS["f16"] * np.inf}}
  updates, state = update(bad, tx.init(LEAF_GROUPS), LEAF_GROUPS)
  assert not state.loss_scale_state.last_finite
  # Updates that are added to params are zero; other leaves keep their value.
  for leaf in jax.tree.leaves(updates["floats"]):
    assert (np.asarray(leaf) == 0).all()
  assert not updates["others"]["int"].any()
  for name in ("bool", "float0", "key", "_overwrite_with_gradient"):
    assert has_same_bits(updates["others"][name], NON_FLOATS[name])
