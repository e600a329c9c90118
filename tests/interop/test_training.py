"""Whole training runs of tf_keras, torch and Flax, step by step against ours.

A linear model, 30 steps, 8 of them with an inf among the inputs; recorded by
`tests/interop/golden/record_*.py`.
"""

from helpers import interop_replay
from helpers import interop_samples as samples
from interop.golden import record_common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import interop

APPLIED = common.TRAINING_STEPS.count("F")
ALL = len(common.TRAINING_STEPS)


def decayed(rate):
  return lambda count: rate / (1 + 0.125 * count)


SCALE, WINDOW = common.TRAINING_SCALE, common.TRAINING_WINDOW
OPTIMIZER = {"initial_scale": SCALE, "dynamic_growth_steps": WINDOW}
TORCH = {"scale": SCALE, "growth_interval": WINDOW, "_growth_tracker": 0}
FLAX = {"fin_steps": 0, "scale": SCALE, "growth_interval": WINDOW - 1}
POLICIES = {
  "keras": interop.from_keras(OPTIMIZER)[0],
  "tf_keras": interop.from_keras({"dynamic": True, **OPTIMIZER})[0],
  "torch": interop.from_torch({**samples.TORCH, **TORCH})[0],
  "flax": interop.from_flax(FLAX)[0],
}


SGD, ADAM = optax.sgd(decayed(0.25)), optax.adam(decayed(0.0625))
# The optimizers as the recorders made them. torch's schedule is the loop's, not
# the optimizer's, so that its runs have none.
RUNS = {
  ("tf_keras", "sgd"): optax.sgd(0.25),
  ("tf_keras", "sgd, decayed"): SGD,
  ("tf_keras", "adam, decayed"): ADAM,
  ("keras", "sgd, decayed"): SGD,
  ("keras", "adam, decayed"): ADAM,
  ("torch", "sgd"): optax.sgd(0.25),
  ("torch", "adam"): optax.adam(0.0625),
  ("flax", "sgd, decayed"): SGD,
  ("flax", "adam, decayed"): ADAM,
}


def recorded(package, name):
  runs = interop_replay.load(package)["training"]
  return next(run for run in runs if run["name"] == name)


def train(policy, inner, *, counts_move_on_skips=False):
  """Params and scale after each step, and the last optimizer state."""
  tx = ols.with_loss_scaling(inner, policy)

  def loss_fn(params, x, y):
    weights, bias = params
    return jnp.mean((x @ weights + bias - y) ** 2)

  @jax.jit
  def step(params, opt_state, x, y):
    _, grads = ols.value_and_grad(loss_fn, opt_state)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = jnp.array(common.FIRST_WEIGHTS), jnp.array(common.FIRST_BIAS)
  opt_state, history = tx.init(params), []
  for at in range(ALL):
    x, y = map(jnp.asarray, common.batch(at))
    params, opt_state = step(params, opt_state, x, y)
    if counts_move_on_skips:
      opt_state = optax.tree.set(opt_state, count=jnp.int32(at + 1))
    flat = np.concatenate([np.ravel(p) for p in params])
    scale = ols.get_loss_scale_state(opt_state).loss_scale
    history.append((flat, float(scale)))
  params, scales = zip(*history, strict=True)
  return np.stack(params), scales, opt_state


@pytest.mark.parametrize("package, name", RUNS)
def test_params_and_scale_are_theirs_at_every_step(package, name):
  theirs = recorded(package, name)
  inner = RUNS[package, name]
  # tf.keras counts skipped steps as well, in its schedules and in Adam.
  moves = package == "tf_keras" and name != "sgd"
  params, scales, _ = train(
    POLICIES[package], inner, counts_move_on_skips=moves
  )
  assert [common.exponent(s) for s in scales] == common.unruns(theirs["scale"])
  expected = np.array(theirs["params"], np.float32)
  # The params are about 0.5, where float32 has steps of 6e-8. torch and Keras
  # round Adam's bias correction differently, by 6e-5 of an update at first.
  atol = 3e-6 if "adam" in name else 1.5e-7
  np.testing.assert_allclose(params, expected, rtol=0, atol=atol)
  assert np.ptp(expected, axis=0).min() > 0.03


def test_the_counters_that_move_on_a_skipped_step_are_those_of_the_docs():
  """What docs/migrating.md says."""
  assert (APPLIED, ALL) == (22, 30)
  counts = {
    (package, counter): count
    for package, name in RUNS
    for counter, count in recorded(package, name)["counts"].items()
  }
  assert counts == {
    ("tf_keras", "iterations"): ALL,
    ("keras", "iterations"): APPLIED,
    ("torch", "LambdaLR.last_epoch"): ALL,
    ("torch", "Adam step"): APPLIED,
    ("flax", "TrainState.step"): ALL,
    ("flax", "schedule"): APPLIED,
  }
  _, _, opt_state = train(POLICIES["flax"], ADAM)
  assert ols.get_loss_scale_state(opt_state).total_notfinite == ALL - APPLIED
  # The counts of Adam and of its schedule.
  ours = [int(c) for _, c in optax.tree.get_all_with_path(opt_state, "count")]
  assert ours == [APPLIED, APPLIED]
