"""The two policies of interop: traced once, typed, exact."""

import dataclasses
import fractions
import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import interop

RULES = {
  "deepspeed": interop.DeepSpeedLossScale(2.0**10, 3, 4.0, 2),
  "deepspeed, consecutive": interop.DeepSpeedLossScale(
    2.0**10, 2, 4.0, 3, consecutive_hysteresis=True
  ),
  "fairseq": interop.FairseqLossScale(3, 2.0**10, 0.3, None, 2.0),
  "fairseq, threshold": interop.FairseqLossScale(2, 2.0**6, 0.0, 16.0),
}
rules = pytest.mark.parametrize("policy", RULES.values(), ids=RULES)


@rules
def test_a_policy_is_a_hashable_loss_scale_that_prints_as_it_is_written(policy):
  assert isinstance(policy, ols.LossScalePolicy)
  assert hash(policy) == hash(dataclasses.replace(policy))
  assert eval(repr(policy), vars(interop)) == policy
  assert type(policy)(**dataclasses.asdict(policy)) == policy


@rules
def test_many_steps_are_one_trace_and_keep_every_dtype(policy):
  traces = []

  @jax.jit
  def step(state, finite):
    traces.append(1)
    return policy.adjust(state, finite)

  state = policy.init()
  types = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
  for finite in [True, False, True, True, True, False, False] * 3:
    state = step(state, jnp.array(finite))
    assert types == jax.tree.map(
      lambda x: (x.shape, x.dtype, x.weak_type), state
    )
  assert len(traces) == 1


@rules
@pytest.mark.parametrize("x64", [False, True])
def test_the_state_is_the_same_in_every_mode_of_jax(policy, x64):
  with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
    state = policy.adjust(policy.init(), jnp.array(False))
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state)}
    assert dtypes <= {"float32", "int32", "bool"}
    _, trace = jax.lax.scan(
      lambda s, f: (policy.adjust(s, f), s.loss_scale),
      state,
      jnp.array([True, False, True]),
    )
    assert trace.dtype == jnp.float32


@rules
def test_a_fresh_state_can_be_donated_twice(policy):
  step = jax.jit(policy.adjust, donate_argnums=0)
  state = step(step(policy.init(), jnp.array(False)), jnp.array(True))
  assert state.total_notfinite == 1


@functools.partial(jax.jit, static_argnums=0)
def scales(policy, start, finite):
  state = policy.init()._replace(loss_scale=start)

  def body(state, finite):
    state = policy.adjust(state, finite)
    return state, state.loss_scale

  return jax.lax.scan(body, state, finite)[1]


@rules
@hypothesis.given(
  steps=st.lists(st.booleans(), min_size=40, max_size=40),
  exponent=st.integers(4, 126),
)
def test_the_scale_stays_between_floor_and_ceiling(policy, steps, exponent):
  trace = scales(policy, jnp.float32(2.0**exponent), np.array(steps))
  assert np.all((policy.min_scale <= trace) & (trace <= 2.0**126))


@rules
def test_counters_saturate(policy):
  last = jnp.int32(2**31 - 1)
  state = jax.tree.map(
    lambda x: last if x.dtype == jnp.int32 else x, policy.init()
  )
  for finite in (True, False, False):
    state = policy.adjust(state, jnp.array(finite))
    counters = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
    assert all(x >= 0 for x in counters)


@rules
def test_the_wrapper_takes_it_as_its_policy(policy):
  tx = ols.with_loss_scaling(optax.sgd(1.0), policy)
  params = {"w": jnp.zeros(())}
  opt_state = tx.init(params)
  for finite in (True, False, True):
    grads = {"w": jnp.float32(1.0 if finite else jnp.nan)}
    updates, opt_state = tx.update(grads, opt_state, params)
    assert (updates["w"] != 0) == finite
  assert ols.get_loss_scale_state(opt_state).total_notfinite == 1


REMEMBERING = {
  "dynamic, hysteresis": ols.DynamicLossScale(hysteresis=2),
  "headroom": ols.HeadroomLossScale(),
  **RULES,
}
FORGETFUL = {
  "dynamic": ols.DynamicLossScale(),
  "fixed": ols.FixedLossScale(8.0),
}
ALL = FORGETFUL | REMEMBERING


@pytest.mark.parametrize("other", ALL.values(), ids=ALL)
@pytest.mark.parametrize("policy", REMEMBERING.values(), ids=REMEMBERING)
def test_every_policy_that_remembers_refuses_a_foreign_state_in_the_same_words(
  policy, other
):
  kind = type(policy.init().memory)
  state = other.init()
  if isinstance(state.memory, kind):
    policy.adjust(state, True, grads_amax=1.0)
    return
  with pytest.raises(ValueError) as info:
    policy.adjust(state, True, grads_amax=1.0)
  assert str(info.value) == (
    f"state.memory must be that of a {type(policy).__name__}, a"
    f" {kind.__name__}, got {type(state.memory).__name__} of another policy, or"
    " of an earlier version. To go on with the same loss scale, use"
    " state._replace(memory=policy.init().memory)."
  )
  adopted = state._replace(memory=policy.init().memory)
  policy.adjust(adopted, True, grads_amax=1.0)


@pytest.mark.parametrize("other", REMEMBERING.values(), ids=REMEMBERING)
@pytest.mark.parametrize("policy", FORGETFUL.values(), ids=FORGETFUL)
def test_a_policy_that_remembers_nothing_goes_on_from_any_state(policy, other):
  state = policy.adjust(other.init(), False)
  assert state.total_notfinite == 1
  assert type(state.memory) is type(other.init().memory)


def test_deepspeed_grows_on_step_w_plus_1_and_then_on_every_w_th():
  """Their description, for W = 1, 2, 3, and again after an overflow."""
  for window in (1, 2, 3):
    policy = interop.DeepSpeedLossScale(8.0, window, hysteresis=1)
    state, grown = policy.init(), []
    for step in range(1, 12):
      before = state.loss_scale
      state = policy.adjust(state, jnp.array(True))
      grown += [step] if state.loss_scale > before else []
    assert grown == list(range(window + 1, 12, window))
    state = policy.adjust(state, jnp.array(False))
    for _ in range(window):
      before = state.loss_scale
      state = policy.adjust(state, jnp.array(True))
      assert state.loss_scale == before
    assert policy.adjust(state, jnp.array(True)).loss_scale == 2 * before


@hypothesis.given(
  part=st.integers(1, 2**31 - 1),
  whole=st.integers(1, 2**31 - 1),
  top=st.integers(0, 2**15),
  bottom=st.integers(1, 2**15),
)
@hypothesis.example(part=1, whole=20, top=1, bottom=20)
@hypothesis.example(part=2**31 - 1, whole=2**31 - 1, top=1, bottom=1)
@hypothesis.example(part=107374182, whole=2147483640, top=1, bottom=20)
@hypothesis.example(part=107374181, whole=2147483640, top=1, bottom=20)
def test_a_share_is_compared_exactly(part, whole, top, bottom):
  share = fractions.Fraction(top, bottom)
  policy = interop.FairseqLossScale(10, tolerance=top / bottom)
  counts = jnp.int32(whole - 1), jnp.int32(part - 1)
  state = policy.init()._replace(memory=interop.FairseqMemory(*counts))
  after = policy.adjust(state, jnp.array(False))
  reached = fractions.Fraction(part, whole) >= share
  assert after.loss_scale == policy.init_scale / (2 if reached else 1)


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_every_tolerance_of_four_digits_is_meant_as_it_is_written(digits):
  bottom = 10**digits
  for top in range(1, bottom, 1 if digits < 3 else 997):
    policy = interop.FairseqLossScale(10, tolerance=top / bottom)
    for overflows, moves in (top, True), (top - 1, False):
      memory = interop.FairseqMemory(
        jnp.int32(bottom - 1), jnp.int32(overflows - 1)
      )
      state = policy.init()._replace(memory=memory)
      after = policy.adjust(state, jnp.array(False))
      assert (after.loss_scale < policy.init_scale) == moves


BAD = [
  (interop.DeepSpeedLossScale, "init_scale", 0.5),
  (interop.DeepSpeedLossScale, "init_scale", 2.0**127),
  (interop.DeepSpeedLossScale, "init_scale", float("nan")),
  (interop.DeepSpeedLossScale, "growth_interval", 0),
  (interop.DeepSpeedLossScale, "min_scale", 0.0),
  (interop.DeepSpeedLossScale, "hysteresis", 1.5),
  (interop.FairseqLossScale, "growth_interval", 2**31),
  (interop.FairseqLossScale, "init_scale", 1e-9),
  (interop.FairseqLossScale, "min_scale", -1.0),
  (interop.FairseqLossScale, "threshold", 0.0),
  (interop.FairseqLossScale, "tolerance", -0.1),
  (interop.FairseqLossScale, "tolerance", float("inf")),
]


@pytest.mark.parametrize("rule, name, value", BAD)
def test_a_hyperparameter_out_of_range_is_named(rule, name, value):
  arguments = {"growth_interval": 10, name: value}
  with pytest.raises(ValueError, match=name):
    rule(**arguments)


@pytest.mark.parametrize(
  "rule, name, value",
  [
    (interop.DeepSpeedLossScale, "init_scale", "65536"),
    (interop.DeepSpeedLossScale, "hysteresis", True),
    (interop.DeepSpeedLossScale, "consecutive_hysteresis", 1),
    (interop.FairseqLossScale, "tolerance", "0.1"),
    (interop.FairseqLossScale, "threshold", [1.0]),
  ],
)
def test_a_hyperparameter_of_a_wrong_type_is_named(rule, name, value):
  with pytest.raises(TypeError, match=name):
    rule(**{"growth_interval": 10, name: value})
