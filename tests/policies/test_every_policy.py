"""Properties of every policy: types, one trace, bounds, distinct states."""

import collections
import dataclasses
import functools
import pickle
import resource

from helpers import mark_slow_params, parametrize_slow
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

FORGETFUL = {
  "fixed": ols.FixedLossScale(8.0),
  "dynamic": ols.DynamicLossScale(2.0**10, 4.0, 0.25, 2, 4.0),
}
REMEMBERING = {
  "dynamic, hysteresis": ols.DynamicLossScale(
    hysteresis=2, hysteresis_refill="backoff"
  ),
  "headroom": ols.HeadroomLossScale(),
  "headroom, float8": ols.HeadroomLossScale(
    dtype=jnp.float8_e5m2, margin=-2, amax_history_len=1
  ),
}
ALL = FORGETFUL | REMEMBERING
QUICK = "dynamic, hysteresis", "headroom"


def parametrize(policies, quick=QUICK):
  values = mark_slow_params([ALL[x] for x in quick], policies.values())
  return pytest.mark.parametrize("policy", values, ids=policies)


each_remembering, each_policy = parametrize(REMEMBERING), parametrize(ALL)
# The program of the headroom rule takes seconds to compile.
each_slow = parametrize(ALL, quick=["dynamic, hysteresis"])
each_remembering_slow = parametrize(REMEMBERING, quick=["dynamic, hysteresis"])


def test_the_defaults_match_the_documentation():
  dynamic = 2.0**15, 2.0, 0.5, 2000, 1.0, 2.0**126, 1, "growth"
  headroom = 2.0**15, jnp.float16, 4, 8, 2.0**-24, 2.0**126
  assert dataclasses.astuple(ols.DynamicLossScale()) == dynamic
  assert dataclasses.astuple(ols.HeadroomLossScale()) == headroom


def adjust(policy, state, finite, amax=2.0**-10):
  return policy.adjust(state, finite, grads_amax=amax)


compiled_adjust = jax.jit(adjust, static_argnums=0)


def step(policy, state, finite, amax=2.0**-10):
  """Adjust by the program that all steps of a policy share."""
  return compiled_adjust(policy, state, np.bool_(finite), np.float32(amax))


@pytest.mark.parametrize("policy", ALL.values(), ids=ALL)
def test_a_policy_is_a_frozen_record_that_prints_as_it_is_written(policy):
  assert isinstance(policy, ols.LossScalePolicy)
  assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
  names = {**vars(ols), "dtype": np.dtype, **vars(jnp)}
  assert eval(repr(policy), names) == policy
  assert type(policy)(**dataclasses.asdict(policy)) == policy
  with pytest.raises(dataclasses.FrozenInstanceError):
    policy.anything = 1


FINITE = np.array([True, False, True, True, True, False, False] * 3)
AMAXES = np.float32([2.0**-10, 8.0, 0.0] * 7)


def run_history(step, state, steps):
  states = []
  for finite, amax in zip(*steps, strict=True):
    state = step(state, finite, amax)
    states.append(state)
  return jax.tree.map(lambda *xs: np.stack(xs), *states)


@pytest.mark.slow  # Outside of jit, each operation is compiled.
@each_policy
def test_eager_jitted_and_numpy_states_are_equal(policy):
  eager = functools.partial(adjust, policy)
  expected = run_history(eager, policy.init(), (FINITE, AMAXES))
  compiled = jax.jit(eager)
  got = run_history(compiled, policy.init(), (FINITE, AMAXES))
  assert has_same_bits(got, expected)
  assert compiled._cache_size() == 1
  in_numpy = lambda *step: jax.tree.map(np.asarray, eager(*step))
  start = jax.tree.map(np.asarray, policy.init())
  got = run_history(in_numpy, start, (FINITE, AMAXES))
  assert has_same_bits(got, expected)


@each_slow
def test_scanned_under_vmap_each_member_has_its_own_state(policy):
  @jax.jit
  @jax.vmap
  def scan(finite, amaxes):
    def body(state, step):
      state = adjust(policy, state, *step)
      return state, state

    return jax.lax.scan(body, policy.init(), (finite, amaxes))[1]

  members = (FINITE, AMAXES), (FINITE[::-1], AMAXES * 2)
  together = scan(*map(np.stack, zip(*members, strict=True)))
  step_of_policy = functools.partial(step, policy)
  for i, steps in enumerate(members):
    expected = run_history(step_of_policy, policy.init(), steps)
    member = jax.tree.map(lambda x: np.asarray(x)[i], together)  # noqa: B023
    assert has_same_bits(member, expected)


@each_policy
@parametrize_slow("x64", [True], [False, True])
def test_types_are_strong_and_32_bits_wide_in_every_mode(policy, x64):
  expected = jax.eval_shape(policy.init)
  with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
    state = policy.init()
    assert jax.eval_shape(lambda: state) == expected
    for amax in (1.0, np.float64(1e30), np.float16(2.0), 1):
      one = functools.partial(adjust, policy, finite=amax != 1, amax=amax)
      assert jax.eval_shape(one, state) == expected
  assert not any(x.weak_type for x in jax.tree.leaves(expected))
  dtypes = {str(x.dtype) for x in jax.tree.leaves(expected)}
  assert dtypes <= {"float32", "int32", "bool"}


@each_slow
def test_counters_saturate(policy):
  last = jnp.int32(2**31 - 1)
  state = policy.init()
  state = jax.tree.map(lambda x: last if x.dtype == jnp.int32 else x, state)
  counts = state._replace(policy_state=policy.init().policy_state)
  assert step(policy, counts, True).finite_count in (0, last)
  skipped = step(policy, counts, False)
  assert skipped.notfinite_count == skipped.total_notfinite == last
  for finite in (True, False, False):
    state = step(policy, state, finite)
    counters = [x for x in state[:5] if x.dtype == jnp.int32]
    assert all(x >= 0 for x in counters)


@each_remembering
def test_every_policy_with_memory_refuses_a_foreign_state(policy):
  kind = type(policy.init().policy_state)
  for other in ALL.values():
    state = other.init()
    if isinstance(state.policy_state, kind):
      continue
    with pytest.raises(ValueError) as info:
      adjust(policy, state, True)
    names = ", ".join(getattr(state.policy_state, "_fields", ())) or "no names"
    got = f"{names} in a {type(state.policy_state).__name__}"
    known = f"{type(policy).__name__} ({', '.join(kind._fields)})"
    message = str(info.value)
    assert f"the fields of {known}, got {got} of another policy, or" in message
    assert "state._replace(policy_state=policy.init().policy_state)" in message
    adopted = state._replace(policy_state=policy.init().policy_state)
    jax.eval_shape(functools.partial(adjust, policy, finite=True), adopted)


@each_remembering_slow
def test_a_policy_state_is_recognized_by_its_fields_in_any_class(policy):
  state = step(policy, policy.init(), True)
  expected = step(policy, state, False)
  fields = state.policy_state._asdict()
  # A class that another version of a module has made, and a checkpoint's dict.
  other = collections.namedtuple("Other", fields)(**fields)
  for policy_state in (other, fields):
    got = step(policy, state._replace(policy_state=policy_state), False)
    assert type(got.policy_state) is type(state.policy_state)
    assert has_same_bits(got, expected)


@each_remembering
def test_a_policy_state_with_other_fields_is_refused_in_any_class(policy):
  state = policy.init()
  fields = {**state.policy_state._asdict(), "more": jnp.int32(0)}
  name = type(state.policy_state).__name__
  states = {
    f", more in a {name} of": collections.namedtuple(name, fields)(**fields),
    ", more in a dict of another": fields,
    "no names in a tuple of another": tuple(fields.values()),
    # A pickle of protocol 1 restores the state like this.
    f" in a {name} of another": tuple.__new__(
      type(state.policy_state), fields.values()
    ),
    # A checkpoint restores a tuple as a list, and an empty state as None.
    "no names in a list of another": [*fields.values()],
    "no names in a NoneType of another": None,
    "no names in a .*Array.* of another": jnp.int32(0),
  }
  for message, policy_state in states.items():
    with pytest.raises(ValueError, match=message):
      adjust(policy, state._replace(policy_state=policy_state), True)


@parametrize_slow("other", ["headroom"], REMEMBERING)
def test_a_fixed_scale_keeps_the_memory_of_another_policy(other):
  policy = FORGETFUL["fixed"]
  state = ols.set_loss_scale(REMEMBERING[other].init(), 2.0**6)
  for finite in (True, False):
    after = step(policy, state, finite)
    assert has_same_bits(after.policy_state, state.policy_state)
    alone = step(policy, state._replace(policy_state=()), finite)
    assert after[:5] == alone[:5]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_dynamic_scale_refuses_the_memory_of_another_policy(hysteresis):
  policy = ols.DynamicLossScale(hysteresis=hysteresis)
  state = REMEMBERING["headroom"].init()
  message = "got max_log2_scale, .* of another policy.*_replace"
  with pytest.raises(ValueError, match=message):
    policy.adjust(state, True)


def test_a_dynamic_scale_without_hysteresis_ignores_that_of_a_state():
  state = REMEMBERING["dynamic, hysteresis"].init()
  after = jax.jit(FORGETFUL["dynamic"].adjust)(state, False)
  assert after.loss_scale == state.loss_scale / 4
  assert jax.eval_shape(lambda: after) == jax.eval_shape(lambda: state)


ARRAYS = [
  (ols.DynamicLossScale, {"init_scale": 8.0, "hysteresis": 2}),
  (ols.DynamicLossScale, {"init_scale": 8.0, "growth_interval": 3}),
  (ols.FixedLossScale, {"scale": 8.0}),
  (ols.HeadroomLossScale, {"amax_history_len": 3, "margin": 1}),
]


@parametrize_slow("row", [0], range(len(ARRAYS)))
@pytest.mark.parametrize(
  "as_array", [jnp.asarray, np.asarray], ids=["jax", "numpy"]
)
def test_hyperparameters_may_be_arrays_and_no_step_deletes_them(row, as_array):
  kind, numbers = ARRAYS[row]
  policy = kind(**{name: as_array(x) for name, x in numbers.items()})
  assert policy == kind(**numbers)
  assert hash(policy) == hash(kind(**numbers))
  assert "rray" not in repr(policy)
  step = jax.jit(functools.partial(adjust, policy), donate_argnums=0)
  for _ in range(2):  # No two leaves share a buffer.
    got = step(step(policy.init(), False), True)
  assert has_same_bits(got, step(step(kind(**numbers).init(), False), True))


def test_hyperparameters_traced_into_a_policy_do_not_share_state_buffers():
  scale, hysteresis = jnp.float32(8), jnp.int32(2)

  @jax.jit
  def init(scale, hysteresis):
    return ols.DynamicLossScale(scale, hysteresis=hysteresis).init()

  state = init(scale, hysteresis)
  jax.jit(lambda x: jax.tree.map(jnp.copy, x), donate_argnums=0)(state)
  assert scale == 8 and hysteresis == 2


STEPS, CHUNKS = 1_000_000, 10
TOP = 2**31 - 1
LONG = "fixed", "dynamic", "dynamic, hysteresis", "headroom"


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_long_run_keeps_bounds_counts_types_and_memory(name):
  policy = ALL[name]
  rng = np.random.default_rng(0)
  tx = ols.with_loss_scaling(optax.sgd(0.0, momentum=0.5), policy)

  @jax.jit
  def run(state, grads):
    def step(state, grad):
      _, state = tx.update({"w": jnp.full(3, grad)}, state)
      return state, state.loss_scale_state.loss_scale

    return jax.lax.scan(step, state, grads)

  state = tx.init({"w": jnp.zeros(3)})
  # It will saturate, except for the fixed scale.
  start = 0 if isinstance(policy, ols.FixedLossScale) else TOP - 10
  state = optax.tree.set(state, total_notfinite=jnp.int32(start))
  types = jax.tree.map(jax.typeof, state)
  skips, resident = 0, []
  for _ in range(CHUNKS):
    overflow = rng.random(STEPS // CHUNKS) < 1 / 200
    grads = np.exp2(rng.normal(-10, 2, STEPS // CHUNKS)).astype(np.float32)
    state, scales = run(state, np.where(overflow, np.float32(np.inf), grads))
    skips += overflow.sum()
    assert scales.min() >= getattr(policy, "min_scale", 8)
    assert scales.max() <= getattr(policy, "max_scale", 8)
    assert jax.tree.map(jax.typeof, state) == types
    resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
  assert abs(skips - STEPS / 200) < 500
  scale_state = state.loss_scale_state
  assert scale_state.total_notfinite == min(start + skips, TOP)
  if start == 0:
    assert scale_state.finite_count == np.argmax(overflow[::-1])
  assert ols.all_finite(state)
  assert resident[-1] - resident[1] < 32 * 1024  # KiB
