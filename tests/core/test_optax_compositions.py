"""Optax's wrappers inside, outside and next to the loss scaler.

An overflow strikes in the middle of each run.
"""

import chex
from helpers.bits import assert_same_bits
from helpers.small_model import (
  init_params,
  loss_fn,
  make_batches,
  make_overflowing_batch,
  make_step,
  train,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

import optax_lossscale as ols

NOT_B = {"b": False, "v": True, "w": True}
ONLY_B = {"b": True, "v": False, "w": False}
SCHEDULE = optax.linear_schedule(0.1, 0.01, transition_steps=10)


INSIDE = {
  "apply_if_finite": optax.apply_if_finite(optax.adam(0.01), 5),
  "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
  "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
  "filter": optax.transforms.conditionally_mask(
    optax.adam(0.01), lambda step, **_: step % 2 == 0, forward_extra_args=True
  ),
  "freeze": optax.chain(optax.adam(0.01), optax.freeze(ONLY_B)),
  "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
  "line search": optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
  ),
  "masked": optax.masked(optax.adam(0.01), NOT_B),
  "MultiSteps": optax.MultiSteps(optax.adam(0.01), 2),
  "MultiSteps with a loss": optax.MultiSteps(optax.polyak_sgd(0.1), 2),
  "partition": optax.partition(
    {"adam": optax.adam(0.01), "sgd": optax.sgd(0.1)},
    {"b": "adam", "v": "sgd", "w": "sgd"},
  ),
  "reduce_on_plateau": optax.chain(
    optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)
  ),
  "sam": contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
  "schedule": optax.sgd(SCHEDULE, momentum=0.9),
  "schedule_free": contrib.schedule_free(optax.sgd(0.1), 0.1),
  "selective_transform": optax.selective_transform(
    optax.adam(0.01), freeze_mask=ONLY_B
  ),
}


def take_value(value, grads, fun):
  return {"value": value}


def take_all(value, grads, fun):
  return {"value": value, "grad": grads, "value_fn": fun}


# The extra arguments of those that need some.
EXTRA = {
  "line search": take_all,
  "MultiSteps with a loss": take_value,
  "reduce_on_plateau": take_value,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_an_inner_transform_is_unchanged_by_an_overflow(name):
  inner, extra = INSIDE[name], EXTRA.get(name)
  tx = ols.with_loss_scaling(inner)
  step = make_step(tx, extra=extra)
  params = init_params()
  opt_state = tx.init(params)
  good = make_batches(5)
  bad = [*good[:3], make_overflowing_batch(good[0]), *good[3:]]

  good_params, good_state = train(step, params, opt_state, good)
  bad_params, bad_state = train(step, params, opt_state, bad)

  assert_same_bits(bad_params, good_params)
  assert_same_bits(bad_state.inner_state, good_state.inner_state)
  scale_state = ols.get_loss_scale_state(bad_state)
  assert scale_state.total_notfinite == 1
  assert scale_state.loss_scale == 2.0**14

  bare = lambda fun, opt_state: jax.value_and_grad(fun)
  bare_step = make_step(inner, extra=extra, value_and_grad=bare)
  bare_params, _ = train(bare_step, params, inner.init(params), good)
  chex.assert_trees_all_close(good_params, bare_params, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lookahead_keeps_fast_and_slow_params_through_an_overflow():
  tx = ols.with_loss_scaling(optax.lookahead(optax.sgd(0.1), 2, 0.5))
  params = optax.LookaheadParams.init_synced(init_params())

  @jax.jit
  def step(params, opt_state, batch):
    value, grads = ols.value_and_grad(loss_fn, opt_state)(params.fast, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  good = make_batches(4)
  bad = [*good[:1], make_overflowing_batch(good[0]), *good[1:]]
  good_params, good_state = train(step, params, tx.init(params), good)
  bad_params, bad_state = train(step, params, tx.init(params), bad)
  assert_same_bits(bad_params, good_params)
  assert_same_bits(bad_state.inner_state, good_state.inner_state)
  assert not np.array_equal(good_params.slow["w"], params.slow["w"])


CLEANING = optax.chain(optax.zero_nans(), optax.clip(1.0))
SGD = optax.sgd(0.1)
# A wrapper of the scaler or of the optimizer, and the skips that it sees.
PLACES = {
  "cleaning before": (optax.chain(CLEANING, ols.with_loss_scaling(SGD)), 0),
  "cleaning inside": (ols.with_loss_scaling(optax.chain(CLEANING, SGD)), 1),
  "apply_if_finite around": (
    optax.apply_if_finite(ols.with_loss_scaling(SGD), 5), 0,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_transforms_outside_of_the_scaler_hide_overflows_from_it(name):
  tx, skips = PLACES[name]
  grads = np.float32([np.nan, np.inf])
  _, opt_state = jax.jit(tx.update)(grads, tx.init(grads), grads)
  scale_state = ols.get_loss_scale_state(opt_state)
  assert scale_state.total_notfinite == skips
  assert scale_state.loss_scale == 2.0 ** (15 - skips)


def test_optax_gets_and_sets_the_scale_and_the_learning_rate():
  """A field called `scale` would collide with the trace of LayerNorm's."""
  inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
  tx = ols.with_loss_scaling(inner)
  params = {"scale": jnp.array([1.0]), "w": jnp.array([2.0])}
  opt_state = tx.init(params)
  assert optax.tree.get(opt_state, "loss_scale") == 2.0**15
  assert optax.tree.get(opt_state, "learning_rate") == np.float32(0.1)

  new = {"loss_scale": jnp.float32(8), "learning_rate": jnp.float32(0.5)}
  opt_state = optax.tree.set(opt_state, **new)
  assert ols.get_loss_scale_state(opt_state).loss_scale == 8
  updates, opt_state = jax.jit(tx.update)(params, opt_state, params)
  np.testing.assert_array_equal(updates["w"], [-1.0])
  assert optax.tree.get(opt_state, "loss_scale") == 8


has_monitor = pytest.mark.skipif(
  not hasattr(optax, "monitor"), reason="this version of Optax has none"
)


@has_monitor
def test_the_message_for_a_monitor_inside_says_how_to_use_it():
  """Its state grows in the first update, so that nothing can be selected."""
  monitor = optax.monitor({"norm": optax.tree.norm})
  tx = ols.with_loss_scaling(optax.chain(monitor, optax.sgd(1.0)))
  w = jnp.ones(2)
  for update in jax.jit(tx.update), tx.update:
    with pytest.raises(ValueError, match=r"monitor.*move it outside"):
      update(w, tx.init(w), w)
