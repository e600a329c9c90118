"""The core under each of JAX's strict modes: same results, nothing tripped."""

import contextlib
import functools

from helpers import parametrize_slow
from helpers.bits import has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

MODES = {
  "plain": contextlib.nullcontext,
  "x64": lambda: jax.enable_x64(True),
  "strict_promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
  "debug_nans": lambda: jax.debug_nans(True),
  "debug_infs": lambda: jax.debug_infs(True),
  "no_transfers": lambda: jax.transfer_guard("disallow"),
  "leaks": jax.checking_leaks,
  "no_jit": jax.disable_jit,
}
OPTIONS = {
  "none": {},
  "all": {"grads_are_scaled": True, "max_norm": 1.0, "check_updates": True},
}


def loss_fn(params, x):
  x, w, b = (a.astype(jnp.float16) for a in (x, params["w"], params["b"]))
  return jnp.mean(jnp.square(jnp.tanh(x @ w + b).astype(jnp.float32)))


def train(tx, params, batches, flags, grads_are_scaled):
  """A jitted loop; a flag of False makes its step a skipped one."""

  def step(carry, inputs):
    params, state = carry
    batch, flag = inputs
    if grads_are_scaled:
      scaled_fn = lambda p: ols.scale_loss(loss_fn(p, batch), state)
      grads = jax.grad(scaled_fn)(params)
    else:
      grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(grads, state, params, grads_finite=flag)
    return (optax.apply_updates(params, updates), state), state

  return jax.lax.scan(step, (params, tx.init(params)), (batches, flags))


RNG = np.random.default_rng(0)
PARAMS = {
  "w": RNG.normal(size=(4, 3)).astype(np.float32),
  "b": np.zeros((2, 3), np.float32),
}
BATCHES = RNG.normal(size=(6, 2, 4)).astype(np.float32)
FLAGS = np.array([True, True, False, True, True, True])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_training_loop_does_the_same_in_every_mode(mode, options):
  options = OPTIONS[options]
  inputs = jax.device_put((PARAMS, BATCHES, FLAGS))
  tx = ols.with_loss_scaling(
    optax.sgd(0.125, momentum=0.5),  # Optax's Adam itself promotes
    ols.DynamicLossScale(2.0**10, growth_interval=3, hysteresis=2),
    **options,
  )
  is_scaled = options.get("grads_are_scaled", False)
  run = functools.partial(train, tx, grads_are_scaled=is_scaled)
  expected = jax.jit(run)(*inputs)
  with MODES[mode]():
    got = jax.jit(run)(*inputs)
  got_state, want_state = got[1].loss_scale_state, expected[1].loss_scale_state
  assert has_same_bits(got_state, want_state)
  assert got_state.last_finite.tolist() == FLAGS.tolist()
  assert got_state.loss_scale.tolist() == [1024.0] * 5 + [2048.0]
  for a, b in zip(*map(jax.tree.leaves, (got[0], expected[0])), strict=True):
    # Fused and unfused float16 arithmetic round differently.
    np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


STOPPING = "debug_nans", "no_transfers", "leaks"


@parametrize_slow("mode", ["debug_nans"], STOPPING)
def test_an_overflow_inside_a_jitted_step_raises_no_error(mode):
  policy = ols.DynamicLossScale(2.0**30)
  tx = ols.with_loss_scaling(optax.sgd(0.1), policy, max_norm=1.0)
  params, batch = jax.device_put((PARAMS, BATCHES[0]))

  @jax.jit
  def step(params, state, batch):
    grads = ols.grad(loss_fn, state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  with MODES[mode]():
    new, state = step(params, state, batch)
  assert state.loss_scale_state.total_notfinite == 1
  assert has_same_bits(new, params)


@parametrize_slow("check_updates", [True], [False, True])
@pytest.mark.parametrize(
  ("make_key", "jit"),
  [
    (jax.random.key, jax.jit),
    pytest.param(jax.random.key, lambda f: f, marks=pytest.mark.slow),
    pytest.param(jax.random.PRNGKey, jax.jit, marks=pytest.mark.slow),
  ],
)
def test_a_key_that_a_skipped_step_used_may_be_used_again(
  make_key, jit, check_updates
):
  def add_noise(grads, key, params=None):
    """Add noise, and return the next key, as `optax.add_noise` does."""
    key, noise_key = jax.random.split(key)
    return grads + jax.random.normal(noise_key, grads.shape), key

  inner = optax.GradientTransformation(lambda params: make_key(0), add_noise)
  tx = ols.with_loss_scaling(inner, check_updates=check_updates)
  grads, keys = jnp.ones(2), []
  step = jit(lambda state, finite: tx.update(grads, state, grads_finite=finite))
  with jax.debug_key_reuse(True):
    state = tx.init(grads)
    for finite in True, False, True:
      _, state = step(state, finite)
      keys.append(state.inner_state)
  first, second, third = map(jax.random.key_data, keys)
  assert has_same_bits(first, second) and not has_same_bits(second, third)


def test_a_key_that_no_update_uses_is_still_unused_after_a_step():
  def fold_in(grads, key, params=None):
    noise_key = jax.random.fold_in(key, 1)
    return grads + jax.random.normal(noise_key, grads.shape), key

  key, grads = jax.random.key(0), jnp.ones(2)
  inner = optax.GradientTransformation(lambda params: key, fold_in)
  tx = ols.with_loss_scaling(inner, check_updates=True)
  with jax.debug_key_reuse(True):
    jax.jit(tx.update)(grads, tx.init(grads))
    jax.random.split(key)
