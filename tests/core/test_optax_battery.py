"""Every optimizer and every wrapper that Optax exports, wrapped."""

import functools
import inspect
import itertools
import platform

from helpers import optax_battery, optimizers, parametrize_slow
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

# Injected hyperparameters become arrays; these may not.
STATIC = {
  "base_optimizer",
  "clip_value_fn",
  "linesearch",
  "memory_size",
  "min_dim_size_to_factor",
  "num_betas",
  "ns_steps",
  "rank",
  "update_proj_gap",
  "warmup_steps",
  "key",
  "seed",
}

FACTORIES = optimizers.get_all_factories()
# Some are deprecated, or take an argument that is.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

# With a state of arrays, with a loss as an argument, and with a line search.
QUICK = "optax.adamw", "optax.polyak_sgd", "optax.lbfgs"


@pytest.mark.slow
@pytest.mark.skipif(
  platform.machine() != "x86_64",
  reason="XLA leaves the multiply-add out for x86 processors only",
)
@pytest.mark.parametrize("module", [*optimizers.MODULES, "wrappers"])
def test_wrapped_optimizers_equal_bare_ones_bit_for_bit(module):
  # At the scales 1 and 2**15, with gradients scaled and true; a skipped step
  # is as if it had not been; one trace; the loss falls.
  found = optax_battery.run_script(optax_battery, module)
  assert found == {name: [] for name in optimizers.get_factories(module)}


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  # A bare line search cannot be mapped either: it asks for a leaf's dtype.
  [name for name in FACTORIES if name != "optax.lbfgs"],
)
def test_the_state_maps_over_params(name):
  tx = make_wrapped(name)
  state = tx.init(init_params())
  assert_same_bits(optax.tree.map_params(tx, lambda x: x, state), state)


def make(name):
  factory, kwargs = FACTORIES[name]
  return factory(**kwargs)


def make_wrapped(name):
  return ols.with_loss_scaling(make(name))


def list_static_args(factory):
  return STATIC & set(inspect.signature(factory).parameters)


def inject_inside(name):
  factory, kwargs = FACTORIES[name]
  inject = optax.inject_hyperparams(factory, list_static_args(factory))
  return ols.with_loss_scaling(inject(**kwargs))


def inject_outside(name):
  factory, kwargs = FACTORIES[name]

  @functools.wraps(factory)
  def wrapped_factory(*args, **kwargs):
    return ols.with_loss_scaling(factory(*args, **kwargs))

  static = list_static_args(factory)
  return optax.inject_hyperparams(wrapped_factory, static)(**kwargs)


def accumulate_inside(name):
  multi_steps = optax.MultiSteps(make(name), every_k_schedule=2)
  return ols.with_loss_scaling(multi_steps)


# How an optimizer is wrapped, and the dtype of the params.
WRAPPINGS = [
  *((make_wrapped, x) for x in ("float16", "bfloat16", "float64")),
  (inject_inside, "float32"),
  (inject_outside, "float32"),
  (accumulate_inside, "float32"),
]


# Each optimizer in float16, and each wrapping of a few; the others are nightly.
CASES = [*itertools.product(WRAPPINGS, FACTORIES)]
FEW = [case for case in CASES if case[0] is WRAPPINGS[0] or case[1] in QUICK]


@parametrize_slow(
  "case",
  [(WRAPPINGS[0], x) for x in QUICK],
  CASES,
  FEW,
  ids=lambda x: f"{x[0][0].__name__} in {x[0][1]}, {x[1]}",
)
def test_types_are_stable(case):
  (make_tx, dtype), name = case
  if make_tx is accumulate_inside and name.endswith(".dpsgd"):
    return  # Gradients of each example cannot be accumulated, as Optax says.
  with jax.enable_x64(dtype == "float64"):
    tx, params = make_tx(name), optax.tree.cast(init_params(), jnp.dtype(dtype))
    # The loss of a model of any type is float32.
    step = functools.partial(optimizers.update, name, tx, jnp.float32(1))
    state = jax.eval_shape(tx.init, params)
    # A second step would find the same types.
    updates, new_state = jax.eval_shape(step, params, state, params)
    assert jax.eval_shape(lambda: params) == updates
  assert new_state == state


# Wrappers outside of the loss scaler, and next to it.


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
