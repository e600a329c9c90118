"""Optax's wrappers outside of and next to the loss scaler.

Those inside of it are among the optimizers of test_optax_battery.py.
"""

from helpers.bits import assert_same_bits
from helpers.small_model import (
  init_params,
  loss_fn,
  make_batches,
  make_overflowing_batch,
)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


@pytest.mark.slow
def test_lookahead_keeps_fast_and_slow_params_through_an_overflow():
  tx = ols.with_loss_scaling(optax.lookahead(optax.sgd(0.1), 2, 0.5))
  start = optax.LookaheadParams.init_synced(init_params())

  @jax.jit
  def step(params, opt_state, batch):
    grads = ols.grad(loss_fn, opt_state)(params.fast, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def train(batches):
    params, opt_state = start, tx.init(start)
    for batch in batches:
      params, opt_state = step(params, opt_state, batch)
    return params, opt_state.inner_state

  first, *others = make_batches(4)
  params, inner_state = train([first, *others])
  bad = make_overflowing_batch(first)
  assert_same_bits(train([first, bad, *others]), (params, inner_state))
  assert not np.array_equal(params.slow["w"], start.slow["w"])


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


@pytest.mark.skipif(
  not hasattr(optax, "monitor"), reason="this version of Optax has none"
)
def test_the_message_for_a_monitor_inside_says_how_to_use_it():
  """Its state grows in the first update, so that nothing can be selected."""
  monitor = optax.monitor({"norm": optax.tree.norm})
  tx = ols.with_loss_scaling(optax.chain(monitor, optax.sgd(1.0)))
  w = jnp.ones(2)
  for update in jax.jit(tx.update), tx.update:
    with pytest.raises(ValueError, match=r"monitor.*move it outside"):
      update(w, tx.init(w), w)
