"""The policies that look at the gradients: models, invariants, sentences."""

import dataclasses
import doctest
import functools
import math
import pathlib
import pickle

import flax.serialization
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import policy_models
import pytest
from zoo import same_bits

import optax_lossscale as ols

STEPS = 48
TOP = 65504.0
NAN, INF = math.nan, math.inf
POLICIES = [ols.HeadroomLossScale(), ols.LogMaxLossScale()]
NARROW = [
  ols.HeadroomLossScale(min_scale=0.25, max_scale=2.0**20, window=5, target=-1),
  ols.LogMaxLossScale(min_scale=0.25, max_scale=2.0**20, deviations=1.0),
]
HEADROOMS = [
  ols.HeadroomLossScale(),
  NARROW[0],
  ols.HeadroomLossScale(dtype=jnp.float8_e5m2, target=2, window=1),
  ols.HeadroomLossScale(dtype=jnp.bfloat16, target=-64, window=3),
]
by_name = pytest.mark.parametrize(
  "policy", POLICIES, ids=lambda p: type(p).__name__
)


@functools.partial(jax.jit, static_argnums=0)
def scan(policy, finites, amaxes, state=None):
  """The states after each step."""

  def step(state, finite_and_amax):
    finite, amax = finite_and_amax
    state = policy.adjust(state, finite, grads_amax=amax)
    return state, state

  state = policy.init() if state is None else state
  return jax.lax.scan(step, state, (finites, amaxes))[1]


def run(policy, amaxes, state=None):
  """The states after steps of these maxima; not finite where it is None."""
  finites = np.array([amax is not None for amax in amaxes])
  amaxes = [INF if amax is None else amax for amax in amaxes]
  return scan(policy, finites, np.array(amaxes, np.float32), state)


def log2_scales(policy, amaxes, state=None):
  return np.log2(run(policy, amaxes, state).loss_scale).tolist()


def last(states):
  return jax.tree.map(lambda x: x[-1], states)


def float32s(**kwargs):
  return st.floats(width=32, allow_subnormal=False, **kwargs)


amaxes_of_any_size = st.one_of(
  st.just(0.0),
  st.integers(-126, 100).map(lambda k: 2.0**k),
  st.builds(
    lambda x, k: float(np.float32(x * 2.0**k)),
    float32s(min_value=1, max_value=2),
    st.integers(-40, 30),
  ),
)


@pytest.mark.parametrize("policy", HEADROOMS, ids=range(len(HEADROOMS)))
@settings(max_examples=30)
@given(
  steps=st.lists(
    st.tuples(st.booleans() | st.just(True), amaxes_of_any_size),
    min_size=STEPS,
    max_size=STEPS,
  )
)
def test_headroom_is_its_plain_python_model(policy, steps):
  finites, amaxes = map(np.array, zip(*steps, strict=True))
  states = scan(policy, finites, np.float32(amaxes))
  scale, window = policy.init_scale, policy_models.fresh(policy)
  for i, (finite, amax) in enumerate(steps):
    scale, window = policy_models.headroom(policy, scale, window, finite, amax)
    assert states.loss_scale[i] == scale, i
    assert states.memory["growth"][i] == window.growth, i


@pytest.mark.parametrize(
  "mantissa", [1.0, 1 + 2**-23, 1.999, 2 - 2**-10, 1.9995]
)
def test_headroom_puts_the_maximum_within_the_binade_under_the_target(mantissa):
  policy = ols.HeadroomLossScale(min_scale=2.0**-110)
  amax = np.float32(mantissa) * np.exp2(np.arange(-100, 100)).astype(np.float32)
  state = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (200, *x.shape)), policy.init()
  )
  for _ in range(16):  # 8 binades at a time
    state = jax.vmap(lambda s, a: policy.adjust(s, True, grads_amax=a))(
      state, amax
    )
  scaled = np.float64(amax) * np.asarray(state.loss_scale)
  # Or a binade lower, if it came from there.
  assert (scaled <= TOP / 8).all()
  assert (scaled > TOP / 32).all()


@settings(max_examples=60)
@given(
  rises=st.lists(
    st.just(3.0) | st.floats(-30, 3), min_size=STEPS, max_size=STEPS
  ),
  first=float32s(min_value=2**-10, max_value=1),
)
def test_headroom_never_overflows_while_maxima_stay_within_the_target(
  rises, first
):
  policy = ols.HeadroomLossScale(window=8)
  amaxes = [first]
  for rise in rises:
    largest = np.float32(max(amaxes[-8:]))
    # Rounded down, so that a step exceeds by a factor of 8 at most.
    amax = np.nextafter(largest * np.float32(2**rise), np.float32(0))
    amaxes.append(
      float(np.clip(amax, 2.0**-40, 2.0**30))
      if rise < 3
      else float(min(largest * 8, 2.0**30))
    )
  scales = run(policy, amaxes).loss_scale
  used = np.append(np.float64(policy.init_scale), scales[:-1])
  assert (used * amaxes <= TOP).all()


def test_headroom_falls_at_once_and_rises_by_more_than_one_binade_only():
  policy = ols.HeadroomLossScale(window=1)
  # 2**-3 wants 2**15, where it starts.
  assert log2_scales(policy, [2**-3, 2**-4, 2**-5]) == [15, 15, 17]
  assert log2_scales(policy, [2**15, 2**14, 2**-24]) == [-3, -3, 5]


def test_headroom_rises_by_8_binades_while_all_gradients_are_zero():
  policy = ols.HeadroomLossScale(max_scale=2.0**30)
  assert log2_scales(policy, [0.0, 0.0, 2**-10]) == [23, 30, 22]


def test_headroom_does_not_take_zeros_for_room_after_other_gradients():
  policy = ols.HeadroomLossScale(window=2)
  assert log2_scales(policy, [2**-3, 0.0, 0.0]) == [15, 15, 23]


def test_headroom_forgets_a_maximum_after_the_window():
  policy = ols.HeadroomLossScale(window=3)
  amaxes = [2**-3, 2**-8, 2**-8, 2**-8]
  assert log2_scales(policy, amaxes) == [15, 15, 15, 20]


def test_headroom_falls_by_2_on_overflow_and_returns_to_the_answer():
  policy = ols.HeadroomLossScale()
  settled = last(run(policy, [2**-3, 2**-3]))
  states = run(policy, [None, None, 2**-3], settled)
  assert np.log2(states.loss_scale).tolist() == [13, 11, 15]
  assert same_bits(
    states.memory["amax_window"][1], settled.memory["amax_window"]
  )


@pytest.mark.parametrize("policy", POLICIES[:1] + HEADROOMS[1:2])
def test_headroom_comes_back_from_forty_overflows_in_seven_steps(policy):
  settled = last(run(policy, [2**-14] * 4))
  burst = last(run(policy, [None] * 40, settled))
  assert burst.loss_scale == policy.min_scale
  after = run(policy, [2**-14] * 7, burst)
  assert after.loss_scale[-1] == settled.loss_scale


def test_headroom_learns_of_an_overflow_that_the_gradients_do_not_show():
  # Something in the backward pass overflows above 2**10; the gradients alone
  # would have 2**20.
  policy = ols.HeadroomLossScale()

  def step(state, _):
    finite = state.loss_scale <= 2.0**10
    return policy.adjust(state, finite, grads_amax=2.0**-8), finite

  _, finite = jax.lax.scan(step, policy.init(), length=10 * 33)
  # Down from 2**15 at first, and then asks again, once a window.
  assert (~finite[4:]).sum() == 10


@functools.partial(jax.jit, static_argnums=0)
def averages(policy, amaxes):
  states = scan(policy, np.ones(len(amaxes), bool), amaxes)
  return states.memory, states.loss_scale


def test_logmax_is_the_published_rule_rounded_down():
  policy = ols.LogMaxLossScale()
  x = np.random.default_rng(0).normal(-9, 0.7, 400)
  memory, scales = averages(policy, np.float32(2.0**x))
  for n in (1, 2, 3, 50, 400):
    fast = 0.99 ** np.arange(n)[::-1]
    slow = 0.999 ** np.arange(n)[::-1]
    mean = np.average(x[:n], weights=fast)
    slow_mean = np.average(x[:n], weights=slow)
    variance = np.average((x[:n] - slow_mean) ** 2, weights=slow)
    np.testing.assert_allclose(memory["log2_mean"][n - 1], mean, rtol=1e-5)
    np.testing.assert_allclose(
      memory["log2_variance"][n - 1], variance, rtol=1e-3, atol=1e-6
    )
    best = math.log2(TOP) - (mean + 3.09 * math.sqrt(variance))
    assert best - 1 - 1e-3 < np.log2(scales[n - 1]) <= best + 1e-3


def test_headroom_returns_exactly_from_a_growth_at_the_largest_scales_too():
  policy = ols.HeadroomLossScale(
    init_scale=2.0**63, dtype=jnp.bfloat16, target=-64
  )
  assert log2_scales(policy, [0.0, None, 2.0**-100]) == [71, 63, 63]


@pytest.mark.parametrize("amax", [2.0**-10, 3 * 2.0**-12, 2.0**20, 2.0**-60])
def test_logmax_does_not_overflow_on_constant_gradients(amax):
  scales = np.float64(run(ols.LogMaxLossScale(), [amax] * STEPS).loss_scale)
  assert (scales * amax <= TOP).all()
  assert (scales * amax > TOP / 2).all()


def test_logmax_is_not_pinned_by_one_overflow():
  policy = ols.LogMaxLossScale()
  rng = np.random.default_rng(0)
  calm = (2.0 ** rng.normal(-14, 0.5, 1000)).tolist()
  before = last(run(policy, calm))
  after = run(policy, [None, *calm[:2]], before)
  drop = np.log2(before.loss_scale) - np.log2(after.loss_scale)
  assert (drop <= 1).all()


@pytest.mark.parametrize("start", [15, 60])
def test_logmax_comes_down_from_overflows_that_come_first(start):
  policy = ols.LogMaxLossScale(init_scale=2.0**start)

  def step(state, _):
    amax = jnp.float32(2.0**8)
    finite = amax * state.loss_scale <= TOP
    state = policy.adjust(state, finite, grads_amax=amax)
    return state, (state.loss_scale, finite)

  _, (scales, finite) = jax.lax.scan(step, policy.init(), length=100)
  assert (~finite).sum() == start - 7
  assert finite[start:].all()
  # And nothing of it is left: 2**7 is the best.
  assert scales[start] == 2.0**7


@pytest.mark.parametrize("zero", [0.0, 2.0**-149, 2.0**-127])
def test_logmax_takes_nothing_from_a_zero_but_a_higher_scale(zero):
  policy = ols.LogMaxLossScale()
  before = last(run(policy, [2**-8, 2**-7] * 5))
  after = run(policy, [zero, zero], before)
  assert same_bits(last(after).memory, before.memory)
  assert (after.loss_scale == before.loss_scale * jnp.array([2, 4])).all()


def test_logmax_does_not_believe_that_an_overflow_is_small():
  policy = ols.LogMaxLossScale()
  before = last(run(policy, [2**-8, 2**-7] * 50))
  state = ols.set_loss_scale(before, 2.0**120)
  after = policy.adjust(state, False, grads_amax=INF)
  assert after.memory["log2_mean"] == before.memory["log2_mean"]
  assert after.loss_scale <= 2 * before.loss_scale


@pytest.mark.parametrize("policy", POLICIES + NARROW, ids=range(4))
@settings(max_examples=30)
@given(
  steps=st.lists(
    st.tuples(
      st.booleans(),
      st.floats(width=32) | st.sampled_from([NAN, INF, 0.0, 2.0**-149]),
    ),
    min_size=STEPS,
    max_size=STEPS,
  )
)
def test_scale_and_memory_stay_finite_in_bounds_and_powers_of_two(
  policy, steps
):
  finites, amaxes = map(np.array, zip(*steps, strict=True))
  states = scan(policy, finites, np.float32(amaxes))
  scales = np.asarray(states.loss_scale)
  assert (np.frexp(scales)[0] == 0.5).all()
  assert (scales >= policy.min_scale).all()
  assert (scales <= policy.max_scale).all()
  for leaf in jax.tree.leaves(states.memory):
    assert np.isfinite(leaf).all()
  moved = np.append(policy.init_scale, scales[:-1]) != scales
  assert (states.finite_count[moved] == 0).all()


@by_name
def test_a_scale_that_was_set_to_anything_becomes_a_power_of_two(policy):
  for value in (1000.0, 3e-38, 2.0**126):
    state = ols.set_loss_scale(policy.init(), value)
    scale = policy.adjust(state, True, grads_amax=2.0**-3).loss_scale
    assert np.frexp(scale)[0] == 0.5


@by_name
def test_adjust_without_the_maximum_says_how_to_get_it(policy):
  with pytest.raises(TypeError, match="with_loss_scaling passes it") as info:
    policy.adjust(policy.init(), True)
  assert type(policy).__name__ in str(info.value)
  grads = {"w": jnp.array([-2.0, 1.0])}
  assert optax.tree.norm(grads, ord="inf") == 2  # As the message says.


@by_name
def test_the_state_of_another_policy_is_refused(policy):
  state = ols.DynamicLossScale().init()
  with pytest.raises(ValueError, match=r"memory=policy\.init\(\)\.memory"):
    policy.adjust(state, True, grads_amax=1.0)
  adopted = state._replace(memory=policy.init().memory)
  policy.adjust(adopted, True, grads_amax=1.0)


BAD = [
  ({"init_scale": 3.0}, ValueError, "init_scale must be a power of two, got"),
  ({"min_scale": 0.0}, ValueError, "min_scale must be a number in"),
  ({"max_scale": 2.0**127}, ValueError, "got max_scale = 1.7"),
  ({"min_scale": 2.0**16}, ValueError, "min_scale <= init_scale"),
  ({"init_scale": "1"}, TypeError, "got init_scale = '1'"),
  ({"dtype": jnp.int8}, TypeError, "dtype must be a float dtype"),
  ({"dtype": "half-ish"}, TypeError, "got dtype = 'half-ish'"),
]
BAD_HEADROOM = [
  ({"target": -65}, ValueError, r"target must be an integer in \[-64, 64\]"),
  ({"target": -2.5}, ValueError, "got target = -2.5"),
  ({"window": 0}, ValueError, "got window = 0"),
  ({"window": True}, TypeError, "got window = True"),
]
BAD_LOGMAX = [
  ({"deviations": -1.0}, ValueError, r"deviations must be a number in \[0, 64"),
  ({"mean_decay": 1.0}, ValueError, "got mean_decay = 1.0"),
  ({"deviation_decay": NAN}, ValueError, "got deviation_decay = nan"),
]


@pytest.mark.parametrize(
  "cls, options, error, message",
  [(ols.HeadroomLossScale, *row) for row in BAD + BAD_HEADROOM]
  + [(ols.LogMaxLossScale, *row) for row in BAD + BAD_LOGMAX],
)
def test_a_bad_hyperparameter_is_named_and_quoted(cls, options, error, message):
  with pytest.raises(error, match=message):
    cls(**options)


def test_a_window_that_is_traced_is_refused_with_the_reason():
  with pytest.raises(
    TypeError, match=r"window must be a Python integer.*shape"
  ):
    jax.jit(lambda n: ols.HeadroomLossScale(window=n).init())(8)


@by_name
def test_a_policy_is_a_hashable_record_of_its_hyperparameters(policy):
  assert type(policy)(**dataclasses.asdict(policy)) == policy
  assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)
  assert isinstance(policy, ols.LossScale)


# Through the optimizer, as it is used.

AMAXES = [2.0**-20, 2.0**-12, NAN, 2.0**-12, 0.0, 2.0**3, INF, 2.0**-9]


def make_step(policy, **options):
  tx = ols.with_loss_scaling(optax.sgd(1.0), policy, **options)
  params = {"w": jnp.zeros(16)}
  direction = jnp.linspace(-1, 0.5, 16)

  def step(opt_state, amax):
    grads = {"w": amax * direction}
    updates, opt_state = tx.update(grads, opt_state, params)
    return opt_state, (updates["w"], opt_state.loss_scale_state)

  return step, tx.init(params)


def history(step, opt_state, amaxes=AMAXES):
  outs = []
  for amax in amaxes:
    opt_state, out = step(opt_state, jnp.float32(amax))
    outs.append(out)
  return jax.tree.map(lambda *xs: jnp.stack(xs), *outs)


@pytest.mark.parametrize("grads_are_scaled", [False, True])
@pytest.mark.parametrize(
  "grads, amax",
  [
    (jnp.array([1.0, -8.0]), 8.0),
    (jnp.array([8.0, -1.0]), 8.0),
    (jnp.array([1 + 2j, 3 - 8j]), 8.0),
    (jnp.array([-0.25, 0.125], jnp.float16), 0.25),
    (jnp.array([-0.25, 0.125], jnp.float8_e5m2), 0.25),
    ({"a": jnp.array([]), "b": jnp.array([-2.0]), "c": jnp.array([1.0])}, 2.0),
    (jnp.zeros(3), 0.0),
  ],
  ids=["negative", "positive", "complex", "f16", "f8", "tree", "zeros"],
)
def test_the_largest_magnitude_is_that_of_either_sign_and_part(
  grads, amax, grads_are_scaled
):
  policy = ols.HeadroomLossScale(init_scale=4.0)
  options = {"grads_are_scaled": grads_are_scaled}
  tx = ols.with_loss_scaling(optax.sgd(1.0), policy, **options)
  _, state = tx.update(grads, tx.init(grads))
  window = state.loss_scale_state.memory["amax_window"]
  assert window[0] == (amax / 4 if grads_are_scaled else amax)


@by_name
def test_eager_jit_and_scan_do_the_same_in_one_trace(policy):
  step, opt_state = make_step(policy)
  compiled = jax.jit(step)
  eager = history(step, opt_state)
  assert same_bits(history(compiled, opt_state), eager)
  assert compiled._cache_size() == 1
  amaxes = jnp.array(AMAXES, jnp.float32)
  assert same_bits(jax.lax.scan(step, opt_state, amaxes)[1], eager)


@by_name
def test_under_vmap_each_member_has_a_scale_of_its_own(policy):
  step, opt_state = make_step(policy)
  members = [AMAXES, AMAXES[::-1], [2.0**-5] * len(AMAXES)]

  def scanned(amaxes):
    return jax.lax.scan(step, opt_state, amaxes)[1]

  together = jax.vmap(scanned)(jnp.array(members, jnp.float32))
  for i, amaxes in enumerate(members):
    alone = scanned(jnp.array(amaxes, jnp.float32))
    assert same_bits(jax.tree.map(lambda x: x[i], together), alone)  # noqa: B023


@by_name
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_jit_moves_the_scale_as_one_device_does(policy, kind):
  step, opt_state = make_step(policy)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
  tx = ols.with_loss_scaling(optax.sgd(1.0), policy)

  @jax.jit
  def sharded(opt_state, grads):
    return tx.update(grads, opt_state, grads)[1]

  state = opt_state
  expected = history(jax.jit(step), opt_state)[1]
  with jax.set_mesh(mesh):
    state = jax.device_put(state, NamedSharding(mesh, P()))
    for i, amax in enumerate(AMAXES):
      grads = {"w": jnp.float32(amax) * jnp.linspace(-1, 0.5, 16)}
      grads = jax.device_put(grads, NamedSharding(mesh, P("data")))
      state = sharded(state, grads)
      want = jax.tree.map(lambda x: x[i], expected)  # noqa: B023
      assert same_bits(state.loss_scale_state, want)


@by_name
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_the_hottest_device_moves_the_scale_of_all(
  policy, check_vma
):
  step, opt_state = make_step(policy, axis_name="data")
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  # One of the devices sees the gradients of make_step, the others hardly any.
  factors = jnp.zeros(8).at[3].set(1.0)

  def on_each(opt_state, factor, amaxes):
    with_factor = lambda s, amax: step(
      s, jnp.where(factor[0] > 0, amax, 2.0**-100)
    )
    return jax.lax.scan(with_factor, opt_state, amaxes)[1][1]

  each = jax.shard_map(
    on_each,
    mesh=mesh,
    in_specs=(P(), P("data"), P()),
    out_specs=P(),
    check_vma=check_vma,
  )
  states = jax.jit(each)(opt_state, factors, jnp.array(AMAXES, jnp.float32))
  alone, _ = make_step(policy)
  # A zero maximum is 2**-100 here.
  amaxes = [max(amax, 2.0**-100) for amax in AMAXES]
  assert same_bits(states, history(alone, opt_state, amaxes)[1])


@by_name
def test_a_run_cut_by_a_checkpoint_goes_on_bit_for_bit(policy):
  step, start = make_step(policy)
  step = jax.jit(step)
  whole = history(step, start)
  for cut in range(1, len(AMAXES)):
    opt_state = start
    for amax in AMAXES[:cut]:
      opt_state, _ = step(opt_state, jnp.float32(amax))
    saved = flax.serialization.to_bytes(opt_state)
    restored = flax.serialization.from_bytes(start, saved)
    rest = history(step, restored, AMAXES[cut:])
    assert same_bits(rest, jax.tree.map(lambda x: x[cut:], whole))  # noqa: B023


@by_name
def test_a_fresh_state_can_be_donated(policy):
  step = jax.jit(
    lambda s: policy.adjust(s, True, grads_amax=1.0), donate_argnums=0
  )
  for _ in range(2):
    step(step(policy.init()))


@by_name
def test_types_are_strong_and_32_bits_wide_in_every_mode(policy):
  expected = jax.tree.map(jax.typeof, policy.init())
  for is_wide in (False, True):
    with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
      state = policy.init()
      for amax in (1.0, np.float64(1e30), jnp.float16(2.0), 1):
        assert jax.tree.map(jax.typeof, state) == expected
        state = jax.jit(policy.adjust)(state, True, grads_amax=amax)
      assert jax.tree.map(jax.typeof, state) == expected


@pytest.mark.parametrize("cls", [ols.HeadroomLossScale, ols.LogMaxLossScale])
def test_hyperparameters_may_be_traced(cls):
  def factory(init_scale, min_scale, max_scale):
    policy = cls(
      init_scale=init_scale, min_scale=min_scale, max_scale=max_scale
    )
    return ols.with_loss_scaling(optax.sgd(1.0), policy)

  tx = optax.inject_hyperparams(factory)(
    init_scale=4.0, min_scale=0.3, max_scale=100.0
  )
  params = jnp.ones(2)
  opt_state = jax.jit(tx.init)(params)
  update = jax.jit(tx.update)
  for _ in range(3):
    _, opt_state = update(jnp.full(2, 2.0**-30), opt_state, params)
  # 64 and 0.5 are the outermost powers of two within.
  assert ols.get_loss_scale_state(opt_state).loss_scale == 64
  for _ in range(3):
    _, opt_state = update(jnp.full(2, 2.0**90), opt_state, params)
  assert ols.get_loss_scale_state(opt_state).loss_scale == 0.5


def test_the_maximum_costs_nothing_where_no_policy_asks_for_it(monkeypatch):
  from optax_lossscale import _grads

  params = {"a": jnp.zeros((64, 32)), "b": jnp.zeros(500)}

  def flops(policy):
    tx = ols.with_loss_scaling(optax.sgd(1.0), policy)
    update = jax.jit(tx.update).lower(params, tx.init(params), params)
    return update.compile().cost_analysis()["flops"]

  dynamic, headroom = flops(ols.DynamicLossScale()), flops(POLICIES[0])
  monkeypatch.setattr(_grads, "largest_magnitude", lambda grads: jnp.float32(0))
  assert dynamic == flops(ols.DynamicLossScale())
  assert headroom > flops(POLICIES[0])


def test_the_page_on_policies_runs_as_it_is_printed():
  page = pathlib.Path(__file__).parents[1] / "docs" / "policies.md"
  failed, attempted = doctest.testfile(
    str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
  )
  assert attempted > 0
  assert failed == 0
