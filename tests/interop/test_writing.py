"""to_torch, to_keras and to_flax write only states that continue like ours."""

import dataclasses

from helpers import interop_replay
from helpers import interop_samples as samples
from interop.golden import encoding
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import interop

WRITERS = {
  "torch": interop.to_torch,
  "tf_keras": interop.to_keras,
  "keras": interop.to_keras,
  "flax": interop.to_flax,
}
EXPORTS = [
  pytest.param(write, case, id=f"{name}, {case['name']}")
  for name, write in WRITERS.items()
  for case in interop_replay.load(name)["exports"]
]


def make_exported_state(floor, case):
  """The policy and state that each case of exported.json was written from."""
  policy, start = ols.DynamicLossScale(growth_interval=1), {}
  if case["name"] == "fixed":
    policy = ols.FixedLossScale(128.0)
  elif case["name"] == "window 3, 1 step in":
    policy = ols.DynamicLossScale(growth_interval=3, min_scale=floor)
    start = {"loss_scale": jnp.float32(1024), "finite_count": jnp.int32(1)}
  elif case["name"] != "window 1":
    # Keras has 2 and 1/2 alone.
    factors = (2.0, 0.5) if "config" in case["exported"] else (4.0, 0.25)
    policy = ols.DynamicLossScale(2.0**16, *factors, 2, floor)
    start = {"finite_count": jnp.int32(5)}
  return policy, policy.init()._replace(**start)


def get_floor(case):
  exported = case["exported"]
  if "minimum_scale" in exported:
    return exported["minimum_scale"]
  return 1.0 if "dynamic" in exported.get("config", {}) else interop_replay.LOW


def read_back(write, written):
  match write:
    case interop.to_keras:
      return interop.from_keras(**written)
    case interop.to_torch:
      return interop.from_torch(written)
  return interop.from_flax(written)


@pytest.mark.parametrize("write, case", EXPORTS)
def test_the_other_system_continues_from_a_written_state(write, case):
  policy, state = make_exported_state(get_floor(case), case)
  written = write(policy, state)
  assert written == case["exported"]
  ours = interop_replay.replay(policy, state, encoding.unpack(case["steps"]))
  if case["name"] == "fixed":
    scales = encoding.decode_runs(case["scale"])
    assert [encoding.encode_scale(float(x)) for x in ours[0]] == scales
  else:
    theirs = encoding.decode_counters(case["counter"])
    interop_replay.assert_same_trajectory(case, theirs, ours, False)
  again, state_again = read_back(write, written)
  if isinstance(policy, ols.DynamicLossScale) and write is not interop.to_keras:
    policy = dataclasses.replace(policy, init_scale=written["scale"])
  assert again == policy
  assert state_again.loss_scale == state.loss_scale
  count = int(state.finite_count)
  if "good_steps" not in str(written):
    # Those that test for equality get a count from which they still grow.
    count = min(count, getattr(policy, "growth_interval", 1) - 1)
  assert state_again.finite_count == count


each_writer = pytest.mark.parametrize(
  "write",
  [interop.to_torch, interop.to_keras, interop.to_flax],
  ids=lambda f: f.__name__,
)
TO = {
  interop.to_torch: ols.DynamicLossScale(min_scale=2.0**-126),
  interop.to_keras: ols.DynamicLossScale(),
  interop.to_flax: ols.DynamicLossScale(),
}
INEXPRESSIBLE = {
  interop.to_torch: {"min_scale": 1.0, "max_scale": 2.0**24, "hysteresis": 2},
  interop.to_keras: {
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "min_scale": 2.0,
    "max_scale": 2.0**24,
    "hysteresis": 3,
  },
  interop.to_flax: {"max_scale": 2.0**24, "hysteresis": 2},
}


@each_writer
def test_a_rule_that_the_other_side_lacks_is_not_written(write):
  for name, value in INEXPRESSIBLE[write].items():
    policy = dataclasses.replace(TO[write], **{name: value})
    with pytest.raises(ValueError, match=f"{write.__name__}.*{name}.*replace"):
      write(policy, policy.init())


@each_writer
def test_only_policies_of_the_other_system_are_written(write):
  state = ols.DynamicLossScale().init()
  for policy in (
    ols.HeadroomLossScale(),
    "dynamic",
    None,
    ols.DynamicLossScale,
    samples.Hostile(),
  ):
    with pytest.raises(TypeError, match=f"{write.__name__}: policy"):
      write(policy, state)


@each_writer
def test_only_a_known_state_is_written(write):
  policy = TO[write]
  state = policy.init()
  with pytest.raises(ValueError, match="loss-scale state"):
    write(policy, {"scale": 1.0})
  with pytest.raises(TypeError, match=r"traced|Abstract tracer"):
    jax.jit(lambda s: write(policy, s))(state)
  batch = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  message = rf"{write.__name__}: state .* of shape \(2,\).* member of a vmap"
  with pytest.raises(ValueError, match=message):
    write(policy, batch)
  first = jax.tree.map(lambda x: x[0], batch)
  assert write(policy, first) == write(policy, state)


def test_a_fixed_scale_is_written_if_the_other_system_has_one():
  one, two = ols.FixedLossScale(1.0), ols.FixedLossScale(2.0)
  assert interop.to_torch(one, one.init()) == {}
  with pytest.raises(ValueError, match=r"to_torch.*scale"):
    interop.to_torch(two, two.init())
  for policy in (one, two):  # Flax has none.
    message = r"to_flax: policy must be a DynamicLossScale, since"
    with pytest.raises(TypeError, match=message):
      interop.to_flax(policy, policy.init())


def test_the_state_may_be_anywhere_in_an_optimizer_state():
  policy = ols.DynamicLossScale()
  opt_state = ols.with_loss_scaling(optax.sgd(0.1), policy).init({"w": 1.0})
  written = interop.to_keras(policy, opt_state)
  assert written == interop.to_keras(policy, policy.init())


@dataclasses.dataclass(frozen=True)
class OneMore(ols.DynamicLossScale):
  """A policy with hyperparameters that no other system has heard of."""

  warmup: int = 0
  kind: str = "usual"


@each_writer
def test_a_new_hyperparameter_is_not_dropped(write):
  """The refused fields are generated from the fields of the policy."""
  policy = OneMore(**dataclasses.asdict(TO[write]))
  assert write(policy, policy.init()) == write(TO[write], policy.init())
  changes = {"warmup": 1000}, {"kind": "other"}
  changed = [dataclasses.replace(policy, **change) for change in changes]
  for new in changed:
    message = f"{write.__name__}: .* express (warmup|kind) = (1000|other)"
    with pytest.raises(ValueError, match=message):
      write(new, new.init())


@each_writer
def test_a_refill_without_hysteresis_has_no_effect_and_is_not_refused(write):
  policy = dataclasses.replace(TO[write], hysteresis_refill="finite")
  assert write(policy, policy.init()) == write(TO[write], policy.init())


@pytest.mark.parametrize("write", [interop.to_keras, interop.to_flax])
def test_a_scale_below_min_scale_is_not_written(write):
  """Ours would return to min_scale in the next step, and theirs would not."""
  policy = ols.DynamicLossScale()
  state = ols.set_loss_scale(policy.init(), 0.5)
  message = r"must be between the minimum 1 and .*, got 0.5. .* Set the"
  with pytest.raises(ValueError, match=message):
    write(policy, state)
  assert write(policy, policy.adjust(state, True))


@pytest.mark.parametrize("floor", [0.7, 0.1, 0.3, 1e-4])
def test_a_scale_at_a_min_scale_that_float32_rounds_is_read_back(floor):
  policy = ols.DynamicLossScale(1.0, min_scale=floor)
  state = policy.init()
  for _ in range(20):
    state = policy.adjust(state, False)
  again, read = interop.from_flax(interop.to_flax(policy, state))
  assert again == dataclasses.replace(policy, init_scale=again.init_scale)
  assert read.loss_scale == state.loss_scale == np.float32(floor)
