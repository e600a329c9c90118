"""Save and restore at any step; adopt the wrapper, and leave it again."""

import itertools

from flax import serialization
from helpers import mark_slow_params, parametrize_slow
from helpers.bits import assert_same_bits
from helpers.checkpoints import restore_by_msgpack, restore_by_orbax
from helpers.small_model import (
  init_params,
  loss_fn,
  make_batches,
  make_overflowing_batch,
  make_step,
)
import jax
import numpy as np
import optax
import pytest

import optax_lossscale as ols

STEPS = 6
# Every hyperparameter away from its default: none may be lost on the way.
POLICIES = {
  "dynamic": ols.DynamicLossScale(
    2.0**8, 4.0, 0.25, 2, 2.0**6, 2.0**12, 2, "finite"
  ),
  "headroom": ols.HeadroomLossScale(init_scale=2.0**8, amax_history_len=3),
}


class Run:
  """One training, compiled once; each step's state is kept."""

  def __init__(self, policy):
    self.tx = ols.with_loss_scaling(optax.sgd(0.01, momentum=0.9), policy)
    self.traces = 0
    self.step = make_step(self.tx, self.count_traces)
    self.params = init_params()
    self.start = self.params, self.tx.init(self.params)
    self.good = make_batches(STEPS)
    self.bad = [make_overflowing_batch(batch) for batch in self.good]

  def count_traces(self, params, batch):
    self.traces += 1
    return loss_fn(params, batch)

  def states(self, overflows, carry=None, first=0):
    """The state before each step from `first` on, and the last."""
    states = [self.start if carry is None else carry]
    for i in range(first, STEPS):
      batch = (self.bad if overflows[i] else self.good)[i]
      states.append(self.step(*states[-1], batch)[:2])
    return states


@pytest.fixture(scope="module", params=mark_slow_params(["dynamic"], POLICIES))
def run(request):
  return Run(POLICIES[request.param])


CUTS = [
  *itertools.product([restore_by_msgpack], range(STEPS + 1)),
  *itertools.product([restore_by_orbax], [1, 3, 5]),
]


@parametrize_slow("case", [(restore_by_msgpack, 3)], CUTS)
def test_a_resumed_run_equals_one_without_a_break(run, case, tmp_path):
  resume, cut = case
  overflows = [False, True, False, False, True, True]
  states = run.states(overflows)
  restored = resume(states[cut], run.start, tmp_path)
  assert_same_bits(restored, states[cut])
  resumed = run.states(overflows, restored, cut)
  assert_same_bits(resumed[-1], states[-1])
  assert run.traces == 1


def test_a_checkpoint_survives_a_change_of_policy():
  before = ols.with_loss_scaling(optax.sgd(0.01), 2.0**9)
  after = ols.with_loss_scaling(optax.sgd(0.01), "dynamic")
  params = init_params()
  data = serialization.to_bytes(before.init(params))
  opt_state = serialization.from_bytes(after.init(params), data)
  assert ols.get_loss_scale_state(opt_state).loss_scale == 2.0**9
  _, opt_state = jax.jit(after.update)(params, opt_state, params)
  assert ols.get_loss_scale_state(opt_state).finite_count == 1


def test_the_wrapper_explains_what_to_do_with_a_state_read_into_dicts(run):
  """To adopt it, as one of a bare optimizer, would nest it in another."""
  params, opt_state = run.states([False, True] + [False] * 4)[3]
  data = serialization.msgpack_restore(serialization.to_bytes(opt_state))
  message = r"got a dict that holds a loss scale.*Orbax.*\.from_state_dict\("
  with pytest.raises(TypeError, match=message) as error:
    run.tx.update(params, data, params)
  assert "inner_state=state" not in str(error.value)
  # The advice, followed.
  restored = serialization.from_state_dict(run.tx.init(params), data)
  assert_same_bits(restored, opt_state)
  jax.eval_shape(run.tx.update, params, restored, params)


def test_a_larger_state_is_distinguished_from_one_without_a_loss_scale(run):
  params, opt_state = run.start
  larger = opt_state, optax.EmptyState()
  with pytest.raises(TypeError, match="ScalingState is part of a larger"):
    run.tx.update(params, larger, params)


def test_float16_moments_of_a_bare_state_are_widened_when_adopted():
  params = {"w": np.ones(3, np.float16)}
  bare = optax.sgd(0.5, momentum=0.5)
  tx = ols.with_loss_scaling(bare)
  fresh = tx.init(params)
  narrow = optax.tree.cast_like(bare.init(params), fresh.inner_state)
  opt_state = fresh._replace(inner_state=narrow)
  assert jax.eval_shape(lambda: opt_state) == jax.eval_shape(lambda: fresh)
  # A trace of 2**-20 would be lost in float16, whose steps there are 2**-24
  # wide, except for its last bits.
  grads = {"w": np.full(3, 2.0**-20 + 2.0**-30, np.float32)}
  _, opt_state = jax.jit(tx.update)(grads, opt_state, params)
  trace = optax.tree.get(opt_state, "trace")["w"]
  np.testing.assert_array_equal(trace, grads["w"])
