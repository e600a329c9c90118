"""HeadroomLossScale: what it promises of the scale, and its use.

The steps that it loses in long runs are in test_starving.py.
"""

import math

from helpers.bits import has_same_bits
from helpers.policy_models import run_policy
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

STEPS = 48
TOP = 65504.0
NAN, INF = math.nan, math.inf
POLICY = ols.HeadroomLossScale()
POLICIES = [
  POLICY,
  ols.HeadroomLossScale(
    min_scale=0.25, max_scale=2.0**20, amax_history_len=5, margin=1
  ),
  ols.HeadroomLossScale(dtype=jnp.float8_e5m2, margin=-2, amax_history_len=1),
  ols.HeadroomLossScale(dtype=jnp.bfloat16, margin=64, amax_history_len=3),
]


# Its program has the window and the range of dtype as constants.
FLOAT8 = ols.HeadroomLossScale(
  init_scale=2.0**8, dtype=jnp.float8_e4m3fn, amax_history_len=3
)


def run(policy, amaxes, state=None):
  """The states after steps of these maxima; not finite where it is None."""
  amaxes = [INF if amax is None else amax for amax in amaxes]
  return run_policy(policy, np.isfinite(amaxes), state, amaxes)


def log2_scales(policy, amaxes, state=None):
  return np.log2(run(policy, amaxes, state).loss_scale).tolist()


def get_state(states, index):
  return jax.tree.map(lambda x: x[index], states)


def get_last(states):
  return get_state(states, -1)


def make_settled_state(policy=POLICY, log2_amax=-14):
  return get_last(run(policy, [2.0**log2_amax] * policy.amax_history_len * 2))


def test_the_maximum_lies_within_the_binade_under_the_target():
  # From the lowest scale, which holds all of them.
  low = 2.0**-110
  policy = ols.HeadroomLossScale(init_scale=low, min_scale=low)
  mantissas = np.float32([[1.0], [1 + 2**-23], [1.999], [2 - 2**-10], [1.9995]])
  for amax in np.ldexp(mantissas, np.arange(-100, 100, 49)).ravel():
    scaled = np.float64(amax) * run(policy, [amax] * 40).loss_scale[-1]
    assert TOP / 32 < scaled <= TOP / 16


@settings(max_examples=settings.default.max_examples // 20)
@given(
  rises=st.lists(st.just(4.0) | st.floats(-30, 4), min_size=48, max_size=48),
  first=st.floats(2**-10, 1, width=32, allow_subnormal=False),
)
def test_no_step_overflows_while_maxima_stay_within_the_target(rises, first):
  amaxes = [first]
  for rise in rises:
    largest = np.float32(max(amaxes[-8:]))
    # Rounded down, so that a step exceeds by a factor of 16 at most.
    amax = np.nextafter(largest * np.float32(2**rise), np.float32(0))
    amax = max(amax, 2.0**-40) if rise < 4 else largest * 16
    amaxes.append(float(min(amax, 2.0**30)))
  scales = run(POLICY, amaxes).loss_scale
  used = np.append(np.float64(POLICY.init_scale), scales[:-1])
  assert (used * amaxes <= TOP).all()


def test_the_scale_falls_at_once_and_rises_when_the_window_has_forgotten():
  # 2**-4 asks for 2**8, where it starts.
  amaxes = [2**-4, 2**0, 2**-4, 2**-4]
  assert log2_scales(FLOAT8, amaxes) == [8, 4, 4, 4]
  amaxes = [2**-4, 2**-9, 2**-9, 2**-9]
  assert log2_scales(FLOAT8, amaxes) == [8, 8, 8, 13]


@pytest.mark.parametrize("zero", [0.0, 2.0**-149, 2.0**-127])
def test_a_few_steps_of_zeros_are_not_evidence_and_preserve_the_window(zero):
  before = make_settled_state()
  after = run(POLICY, [zero] * 7, before)
  assert (after.loss_scale == before.loss_scale).all()
  policy_states = get_last(after).policy_state, before.policy_state
  assert has_same_bits(*(x.amax_history for x in policy_states))


@pytest.mark.parametrize("margin", [-6, 1, 4, 10])
def test_the_margin_is_the_binades_between_the_gradients_and_the_top(margin):
  # Steps of gradients, float32 gradients and overflows.
  amaxes = [2.0**-14] * 40 + [2.0**30] + [None] * 7
  states = run(ols.HeadroomLossScale(margin=margin), amaxes)
  log2_scale = np.log2(states.loss_scale)
  # The top of float16 is just below 2**16.
  assert log2_scale[39] == 15 - margin + 14
  # The surrogate asks for 8 binades more, whatever the margin.
  surrogate = states.policy_state.amax_history[40, 0]
  assert np.log2(surrogate) == 15 - margin - (log2_scale[39] + 8)
  # The largest gradient is the smallest normal number, 2**-14.
  assert log2_scale[-1] == 0


def test_a_sum_over_workers_above_the_float16_maximum_is_evidence():
  # There are 1,024 workers, each with gradients of 2**-10 of the largest.
  policy = ols.HeadroomLossScale(margin=4 - 10)
  for amax, is_recorded in (2.0**10, True), (2.0**12, False):
    history = run(policy, [amax]).policy_state.amax_history
    assert (history[0, 0] == amax) == is_recorded


def overflows_above(highest, start, steps=40, amax=2.0**-14):
  """The exponents of the scales where steps overflow above one of them."""
  states, scales = jax.tree.map(
    lambda x: np.asarray(x)[:steps],
    scan_with_overflows(2.0**highest, start, amax),
  )
  return np.log2(scales), states


@jax.jit
def scan_with_overflows(highest, start, amax):
  def step(state, _):
    finite = state.loss_scale <= highest
    after = POLICY.adjust(state, finite, grads_amax=amax)
    return after, (after, state.loss_scale)

  return jax.lax.scan(step, start, length=30_000)[1]


@pytest.mark.parametrize("highest", [2, 8, 15, 23, 24])
def test_a_limit_is_found_by_bisection(highest):
  scales, _ = overflows_above(highest, make_settled_state())
  assert (scales > highest).sum() <= 9
  assert scales[-1] == highest


def test_a_limit_from_larger_intermediate_values_costs_few_steps():
  # Something in the backward pass overflows above 2**10; the gradients alone
  # would have 2**19.
  scales, _ = overflows_above(10, POLICY.init(), 30_000, 2.0**-8)
  lost = scales > 10
  # The way to it, and then fewer than dynamic, which grows every 2,000 steps.
  assert lost[:1000].sum() <= 8
  assert lost[1000:].sum() <= 30_000 / 4_000


# In binades, each after 4,096 steps: one, two, four and then always eight.
@pytest.mark.parametrize(
  "highest, rises", [(20, [20, 21, 23]), (2, [2, 3, 5, 9, 17, 25])]
)
def test_a_scale_that_overflowed_is_retried_by_doubled_steps(highest, rises):
  _, states = overflows_above(highest, make_settled_state())
  scales, _ = overflows_above(100, get_last(states), 30_000)
  assert scales[0] == highest
  assert scales[4000:26_000:4096][: len(rises)].tolist() == rises
  assert scales[-1] == 25


def test_a_failed_increase_of_any_size_is_reverted():
  _, states = overflows_above(15, make_settled_state())
  # Nothing overflows above 15 for a while, and then it does again.
  _, raised = overflows_above(100, get_last(states), 30_000)
  for rises, held in ((1, 15 + 1), (2, 15 + 3), (3, 15 + 7)):
    state = get_state(raised, 4096 * rises + 40 - 1)
    assert np.log2(state.loss_scale) == held
    scales, _ = overflows_above(held - 1, state)
    assert (scales > held - 1).sum() == 1
    assert scales[-1] == 15 + [0, 1, 3][rises - 1]


def test_a_burst_of_nans_leaves_the_scale_within_a_binade():
  start = make_settled_state()
  for length in range(1, 61):
    # All of one length, for which it is compiled once.
    amaxes = [2.0**-14] * (60 - length) + [None] * length + [2.0**-14] * 10
    below = 25 - np.array(log2_scales(POLICY, amaxes, start))
    # But for the guesses of a search.
    assert below[60 - length :][:7].max() <= 25, length
    assert below[-1] <= 1, length


def test_a_limit_is_never_where_the_largest_gradient_would_be_subnormal():
  # float8_e4m3fn ends at 448, and below 2**-6 its numbers are subnormal.
  states = run(FLOAT8, [2.0**-14] * 8 + [None] * 7)
  assert states.loss_scale[-2] * 2.0**-14 >= 2.0**-6


def test_shrinking_gradients_discard_their_limit():
  _, states = overflows_above(5, make_settled_state())
  scales = log2_scales(POLICY, [2.0**-40] * 12, get_last(states))
  # 25 below what they ask for, the largest is just a normal number.
  assert scales[-1] >= 51 - 25


def run_search():
  _, states = overflows_above(10, make_settled_state())
  start = get_last(run(POLICY, [0.0] * 7, get_state(states, 19)))
  states = run(POLICY, [0.0] * 128, start)
  return np.log2(states.loss_scale).tolist(), states


@pytest.mark.parametrize("outcome", [0.0, None])
def test_a_proposal_without_gradients_costs_and_changes_nothing(outcome):
  scales, states = run_search()
  for guessed in (-24, 120):
    before = get_state(states, scales.index(guessed))
    after = get_last(run(POLICY, [outcome], before))
    quiet = before.policy_state.steps_without_grads + 1
    expected = before.policy_state._replace(steps_without_grads=quiet)
    assert has_same_bits(after.policy_state, expected)


def test_gradients_seen_only_at_a_proposed_scale_are_the_only_evidence():
  scales, states = run_search()
  before = get_state(states, scales.index(72))
  found = get_last(run(POLICY, [2.0**-60], before))
  assert found.policy_state.amax_history.tolist() == [2.0**-60] + [0.0] * 7
  assert found.loss_scale == make_settled_state(log2_amax=-60).loss_scale
  # The usual scale would have seen these.
  before = get_state(states, scales.index(8))
  known = get_last(run(POLICY, [2.0**-14], before))
  assert known.policy_state.amax_history[1] == 2.0**-14


def test_failed_searches_become_rare_until_consecutive_gradients_arrive():
  sparse = [0.0] * 39 + [2.0**-14]

  def guesses(state):
    scales = np.array(log2_scales(POLICY, sparse * 5, state))
    return (scales != 25).sum()

  state = make_settled_state()
  assert guesses(state) > 10
  state = get_last(run(POLICY, sparse * 10, state))
  assert guesses(state) == 0
  state = get_last(run(POLICY, [2.0**-14] * 60, state))
  assert guesses(state) > 10


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=range(4))
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
def test_the_scale_stays_a_power_of_two_within_its_bounds(policy, steps):
  finites, amaxes = zip(*steps, strict=True)
  states = run_policy(policy, finites, None, amaxes)
  scales = states.loss_scale
  assert (np.frexp(scales)[0] == 0.5).all()
  assert (scales >= policy.min_scale).all()
  assert (scales <= policy.max_scale).all()
  for leaf in jax.tree.leaves(states.policy_state):
    assert np.isfinite(leaf).all()
  moved = np.append(policy.init_scale, scales[:-1]) != scales
  assert (states.finite_count[moved] == 0).all()


def test_the_count_of_finite_steps_restarts_when_the_scale_changes():
  states = run(POLICY, [2.0**-10, 2.0**-10, 2.0**-10, 2.0**-6])
  assert states.finite_count.tolist() == [0, 1, 2, 0]


def test_a_scale_set_to_any_value_becomes_a_power_of_two():
  for value in (1000.0, 3e-38, 2.0**126):
    state = ols.set_loss_scale(POLICY.init(), value)
    scale = run(POLICY, [2.0**-3], state).loss_scale[0]
    assert np.frexp(scale)[0] == 0.5


def test_adjust_without_the_maximum_says_how_to_get_it():
  with pytest.raises(TypeError, match="with_loss_scaling passes it"):
    POLICY.adjust(POLICY.init(), True)


BAD = [
  ({"init_scale": 3.0}, ValueError, "init_scale must be a power of two, got"),
  ({"max_scale": 2.0**127}, ValueError, "got max_scale = 1.7"),
  ({"min_scale": 2.0**16}, ValueError, "min_scale <= init_scale"),
  ({"dtype": jnp.int8}, TypeError, "dtype must be a float dtype"),
  ({"dtype": None}, TypeError, "got dtype = None"),
  ({"dtype": "half-ish"}, TypeError, "got dtype = 'half-ish'"),
  ({"margin": 65}, ValueError, r"margin must be an integer in \[-64, 64\]"),
  ({"margin": 2.5}, ValueError, "got margin = 2.5"),
  ({"amax_history_len": 0}, ValueError, "got amax_history_len = 0"),
  ({"amax_history_len": True}, TypeError, "got amax_history_len = True"),
]


@pytest.mark.parametrize("options, error, message", BAD)
def test_a_bad_hyperparameter_is_named_and_quoted(options, error, message):
  with pytest.raises(error, match=message):
    ols.HeadroomLossScale(**options)


def test_a_traced_history_length_is_refused_with_the_reason():
  message = "amax_history_len must be a Python integer.*shape"
  with pytest.raises(TypeError, match=message):
    jax.jit(lambda n: ols.HeadroomLossScale(amax_history_len=n).init())(8)


@pytest.mark.parametrize(
  "dtype",
  ["float16", np.float16, np.dtype("float16")],
  ids=["name", "type", "dtype"],
)
def test_policies_are_equal_for_every_spelling_of_their_dtype(dtype):
  assert ols.HeadroomLossScale(dtype=dtype) == POLICY


def test_traced_bounds_are_those_of_the_powers_of_two_within():
  state = ols.set_loss_scale(POLICY.init(), 4.0)
  bounds = {"min_scale": 0.3, "max_scale": 100.0}
  for amax, scale in (2.0**-30, 64), (2.0**13, 0.5):
    states = run_policy(POLICY, [True] * 3, state, amax, **bounds)
    assert states.loss_scale[-1] == scale
