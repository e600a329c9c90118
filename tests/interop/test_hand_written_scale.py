"""A training loop with a hand-written scale continues as the page says.

docs/reference/migrating.md shows the changes. The loop is a short form of
DreamerV3's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

INTERVAL = 5  # 1,000 in DreamerV3
ADAM = optax.adam(1e-2)
BARE = optax.apply_if_finite(ADAM, max_consecutive_errors=1000)
POLICY = ols.DynamicLossScale(
  init_scale=1e4,
  growth_interval=INTERVAL + 1,
  min_scale=1e-4,
  max_scale=1e5,
)
TX = ols.with_loss_scaling(ADAM, POLICY)
PARAMS = {"w": jnp.full((4, 1), 0.1)}
GOOD_BATCH = jnp.ones((8, 4))
BAD_BATCH = jnp.full((8, 4), 60000.0)  # overflows float16


def loss_fn(params, x):
  out = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
  return jnp.mean(out.astype(jnp.float32) ** 2)


@jax.jit
def bare_step(state, batch):
  """The original loop: it adjusts the scale, and apply_if_finite skips."""
  scale = state["scale"]

  def scaled_loss_fn(params):
    loss = loss_fn(params, batch)
    return loss * scale, loss

  grads, loss = jax.grad(scaled_loss_fn, has_aux=True)(state["params"])
  grads = jax.tree.map(lambda g: g / scale, grads)
  finite = jnp.isfinite(optax.tree.norm(grads))
  grow = finite & (state["good"] >= INTERVAL)
  updates, opt = BARE.update(grads, state["opt"], state["params"])
  factor = jnp.where(grow, 2.0, jnp.where(finite, 1.0, 0.5))
  return {
    "params": optax.apply_updates(state["params"], updates),
    "opt": opt,
    "scale": jnp.clip(scale * factor, 1e-4, 1e5),
    "good": jnp.where(finite & ~grow, state["good"] + 1, 0),
  }, loss


@jax.jit
def wrapped_step(state, batch):
  """The loop with the wrapper, and the two calls at which it scales."""
  params, opt = state["params"], state["opt"]

  def scaled_loss_fn(params):
    loss = loss_fn(params, batch)
    return ols.scale_loss(loss, opt), loss

  grads, loss = jax.grad(scaled_loss_fn, has_aux=True)(params)
  grads = ols.unscale_grads(grads, opt)
  updates, opt = TX.update(grads, opt, params)
  return {"params": optax.apply_updates(params, updates), "opt": opt}, loss


def adopt(bare):
  scale_state = POLICY.init()._replace(
    loss_scale=bare["scale"], finite_count=bare["good"]
  )
  opt = ols.WithLossScalingState(scale_state, bare["opt"].inner_state)
  return {"params": bare["params"], "opt": opt}


@pytest.mark.slow
def test_both_loops_move_the_scale_skip_and_learn_alike():
  bare = {
    "params": PARAMS,
    "opt": BARE.init(PARAMS),
    "scale": jnp.float32(1e4),
    "good": jnp.int32(0),
  }
  wrapped = {"params": PARAMS, "opt": TX.init(PARAMS)}
  for i in range(60):
    if i == 35:
      wrapped = adopt(bare)
    batch = BAD_BATCH if i % 10 == 9 else GOOD_BATCH
    bare, bare_loss = bare_step(bare, batch)
    wrapped, loss = wrapped_step(wrapped, batch)
    assert ols.get_loss_scale_state(wrapped).loss_scale == bare["scale"]
    np.testing.assert_allclose(loss, bare_loss, rtol=1e-5)
  assert bare["opt"].total_notfinite == 6
