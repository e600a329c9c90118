"""The rules, against a plain Python model and as sentences."""

import re

from helpers import ROOT
from helpers.policy_models import Model, run_policy
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

REFILLS = ["growth", "finite", "backoff"]
POWERS = [2.0**k for k in range(-126, 127)]


def run_scales(policy, string, state=None):
  """The scales after each step of a string of F (finite) and T (overflow)."""
  finites = [c == "F" for c in string]
  return run_policy(policy, finites, state).loss_scale.tolist()


@st.composite
def policies(draw):
  scales = st.lists(st.sampled_from(POWERS), min_size=3, max_size=3)
  low, init, high = sorted(draw(scales))
  return ols.DynamicLossScale(
    init_scale=init,
    growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 2.0**100])),
    backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.7, 2.0**-100])),
    growth_interval=draw(st.integers(1, 5)),
    min_scale=low,
    max_scale=high,
    hysteresis=draw(st.integers(1, 4)),
    hysteresis_refill=draw(st.sampled_from(REFILLS)),
  )


@settings(max_examples=settings.default.max_examples // 5)
@given(policies(), st.lists(st.booleans(), min_size=30, max_size=30))
def test_dynamic_follows_its_model(policy, finites):
  model = Model(policy)
  expected = []
  for finite in finites:
    model.step(finite)
    left = () if model.policy_state is None else (model.policy_state,)
    counts = model.count, model.in_a_row, finite, model.total
    expected.append((model.scale, *counts, *left))
  states = run_policy(policy, finites)
  steps = zip(*(x.tolist() for x in jax.tree.leaves(states)), strict=True)
  assert list(steps) == expected


@pytest.mark.parametrize(
  "refill, mixed, overflows",
  [
    ("growth", [64, 64, 32, 16, 16, 8], [64, 32, 16, 8]),
    ("finite", [64, 64, 64, 32, 32, 32], [64, 32, 16, 8]),
    ("backoff", [64, 64, 64, 32, 32, 32], [64, 32, 32, 16]),
  ],
)
def test_hysteresis_of_two_tolerates_one_overflow(refill, mixed, overflows):
  policy = ols.DynamicLossScale(64.0, hysteresis=2, hysteresis_refill=refill)
  assert run_scales(policy, "TFTTFT") == mixed
  assert run_scales(policy, "TTTT") == overflows


def simulate_guided_diffusion(steps):
  """Return the scale after each step: the log2 moves at each of them."""
  log_scale = 20.0
  for step in steps:
    log_scale += 0.001 if step == "F" else -1
    yield 2**log_scale


def simulate_colossalai(steps):
  """Return the scale after each step: two overflows tolerate one."""
  scale, growth_step, hysteresis_step = 2.0**16, 0, 0
  for step in steps:
    growth_step += 1
    if step == "T":
      hysteresis_step += 1
      growth_step = 0
      scale *= 0.5 if hysteresis_step >= 2 else 1
    elif growth_step == 1000:
      growth_step = hysteresis_step = 0
      scale *= 2
    yield scale


SCALERS = {
  "guided-diffusion": simulate_guided_diffusion,
  "ColossalAI": simulate_colossalai,
}


PAGE = (ROOT / "docs" / "reference" / "migrating.md").read_text()


def read_policy(pattern):
  (call,) = re.findall(pattern, PAGE, re.MULTILINE)
  return eval(call, {"ols": ols})


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_policy_of_the_page_on_migrating_follows_the_rule(scaler):
  steps = "FFTFTTT" + 2100 * "F" + "TFTT"
  policy = read_policy(rf"^\| [^|]*{scaler}[^|]*\| `(ols\.[^`]*)` \|")
  found = run_scales(policy, steps)
  # The float32 factor of 2**0.001 differs by 6e-8, in each of 2,000 steps.
  expected = [*SCALERS[scaler](steps)]
  np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_the_settings_of_other_scalers_on_the_page_make_a_policy():
  rows = re.findall(r"\| `(ols\.[^`]*)` \| `([^`]*)` \|", PAGE)
  for call, defaults in rows:
    settings = eval(f"dict({defaults})")
    policy = eval(call, {"ols": ols, **settings})
    assert run_scales(policy, "FT")[0] == policy.init_scale
  assert len(rows) == 5


def test_the_policy_of_the_page_continues_a_hand_written_scale():
  """That of DreamerV3, which the page shows how to replace."""
  policy = read_policy(r"^policy = (ols\.Dynamic[^)]*init_scale=1e4[^)]*\))$")
  steps = 2100 * "F" + "TFTT" + 2005 * "F" + 40 * "T"
  states = [(1e4, 0)]
  for step in steps:
    scale, good = states[-1]
    grows = step == "F" and good >= 1000
    scale *= 2 if grows else 1 if step == "F" else 0.5
    good = 0 if grows or step == "T" else good + 1
    states.append((np.clip(scale, 1e-4, 1e5), good))
  for first in 0, 700:
    scale, good = states[first]
    numbers = {"loss_scale": np.float32(scale), "finite_count": np.int32(good)}
    state = policy.init()._replace(**numbers)
    found = run_scales(policy, steps[first:], state)
    expected = [scale for scale, _ in states[first + 1 :]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("count", [3, 4, 1000, 2**31 - 1])
def test_a_restored_count_at_or_above_the_interval_grows_at_once(count):
  policy = ols.DynamicLossScale(1.0, growth_interval=3)
  state = policy.init()._replace(finite_count=jnp.int32(count))
  assert run_scales(policy, "FFFF", state) == [2, 2, 2, 4]


def test_a_custom_policy_may_define_min_scale():
  class Own:
    init, adjust = ols.FixedLossScale(8.0).init, ols.FixedLossScale(8.0).adjust
    min_scale = 8.0

  policy = Own()
  assert isinstance(policy, ols.LossScalePolicy)
  state = policy.adjust(policy.init(), False)
  assert ols.loss_scale_metrics(state, policy=policy)["skips_at_min_scale"]


def test_a_traced_hysteresis_counts_only_if_the_state_does():
  adjust = jax.jit(
    lambda hysteresis, state: ols.DynamicLossScale(
      hysteresis=hysteresis
    ).adjust(state, False)
  )
  counting = ols.DynamicLossScale(hysteresis=2).init()
  after = adjust(2, counting)
  assert (after.loss_scale, after.policy_state) == (2.0**15, (1,))
  plain = adjust(1, ols.DynamicLossScale().init())
  assert (plain.loss_scale, plain.policy_state) == (2.0**14, ())
  with pytest.raises(ValueError, match="of another policy"):
    adjust(1, ols.HeadroomLossScale().init())
