"""Resuming a run that was saved before its optimizer was wrapped.

With Flax's own functions, of which one use loses the optimizer's state without
a word.
"""

from typing import Any

from flax.training import checkpoints
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from helpers.bits import assert_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale import interop

BARE = optax.chain(
  optax.trace(decay=0.9),
  optax.scale_by_schedule(optax.linear_schedule(-0.1, 0.0, 100)),
)
TX = ols.with_loss_scaling(BARE)
STEPS = 20


class ScaledTrainState(TrainState):
  """A train state with a separate scale, as in Flax's ImageNet example."""

  dynamic_scale: Any


@jax.jit
def step(state):
  return state.apply_gradients(grads=jax.tree.map(jnp.sin, state.params))


def train(state, steps=STEPS):
  for _ in range(steps):
    state = step(state)
  return state


def make_state(tx, cls=TrainState, **fields):
  params = {"w": np.linspace(0.5, 1, 4, dtype=np.float32)}
  return cls.create(apply_fn=None, params=params, tx=tx, **fields)


def get_momentum(state):
  return optax.tree.norm(optax.tree.get(state.opt_state, "trace")).item()


def get_count(state):
  return optax.tree.get(state.opt_state, "count").item()


def save_and_restore(folder, saved, target):
  checkpoints.save_checkpoint(folder, saved, STEPS)
  return checkpoints.restore_checkpoint(folder, target)


def adopt(restored):
  """Resume as the pages say."""
  opt_state = TX.init(restored.params)._replace(inner_state=restored.opt_state)
  return restored.replace(tx=TX, opt_state=opt_state)


def assert_training_continues(state, saved):
  """The state trains on as the saved one would have, without the wrapper."""
  assert (state.step, get_count(state)) == (STEPS, STEPS)
  mine, theirs = train(state, 3), train(saved, 3)
  assert_same_bits(mine.params, theirs.params)
  assert_same_bits(mine.opt_state.inner_state, theirs.opt_state)


def test_flaxs_restore_into_a_wrapped_state_loses_the_momentum(tmp_path):
  """The known trap. If this fails, Flax has fixed it: update the page."""
  saved = train(make_state(BARE))
  assert get_momentum(saved) > 0.5
  restored = save_and_restore(tmp_path, saved, make_state(TX))
  assert_same_bits(restored.params, saved.params)
  assert (get_momentum(restored), get_count(restored)) == (0, 0)
  # The count of the schedule shows it.
  skips = ols.get_loss_scale_state(restored).total_notfinite
  assert restored.step - skips - get_count(restored) == STEPS


def test_a_run_restored_into_the_bare_state_continues(tmp_path):
  saved = train(make_state(BARE))
  restored = save_and_restore(tmp_path, saved, make_state(BARE))
  assert_training_continues(adopt(restored), saved)


def test_a_run_with_dynamic_scale_keeps_its_scale(tmp_path):
  scale = DynamicScale(growth_interval=12)
  target = make_state(BARE, ScaledTrainState, dynamic_scale=scale)
  # A run that has grown once.
  grown = scale.replace(fin_steps=8, scale=jnp.float32(2.0**17))
  saved = train(target.replace(dynamic_scale=grown))
  restored = save_and_restore(tmp_path, saved, target)

  policy, scale_state = interop.from_flax(restored.dynamic_scale)
  tx = ols.with_loss_scaling(BARE, policy)
  opt_state = ols.WithLossScalingState(scale_state, restored.opt_state)
  kept = {"step": restored.step, "params": restored.params}
  state = make_state(tx).replace(opt_state=opt_state, **kept)
  assert policy.growth_interval == 13  # Flax grows a step later
  found = ols.get_loss_scale_state(state)
  assert (found.loss_scale, found.finite_count) == (2.0**17, 8)
  assert_training_continues(state, saved)
